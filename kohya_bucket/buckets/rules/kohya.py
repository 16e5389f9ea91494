"""Kohya's rule: the buckets of sd-scripts, and which one an image gets.

Source: kohya-ss/sd-scripts, `model_util.make_bucket_resolutions` and `BucketManager.select_bucket`,
unchanged from 0.8.7 to 0.10.1. Results are equal row by row, floats included.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.choices import NO_UPSCALE_FITS, SWITCHING_METHODS
from kohya_bucket.buckets.limits import Limits, check_max_crop, nearest_within
from kohya_bucket.buckets.no_upscale import corrected_without_upscaling, usual_where_filled, without_upscaling
from kohya_bucket.buckets.rule import Assignment, RuleBase
from kohya_bucket.buckets.rules.registry import RuleRequest
from kohya_bucket.buckets.sizes import IntArray, as_resolution, as_whole, check_steps, longest_side
from kohya_bucket.buckets.switching import aspect_switch
from kohya_bucket.checks import as_flag, known_keyword, one_of
from kohya_bucket.errors import BucketSettingsError


def kohya_bucket_sizes(
    max_reso: tuple[int, int], min_size: int = 256, max_size: int = 1024, reso_steps: int = 64
) -> list[tuple[int, int]]:
    """The sizes sd-scripts generates, sorted by (width, height).

    For each width from `min_size` in steps: the largest height within the area of `max_reso` and within
    `max_size`, and the transpose; plus the square of that area, floored to the step.
    """
    max_area = max_reso[0] * max_reso[1]
    side = int(math.sqrt(max_area) // reso_steps) * reso_steps
    sizes = {(side, side)}
    # beyond the area over the shortest side no height is left, however large `max_size` is
    widest = min(max_size, max_area // max(min_size, 1))
    for width in range(min_size, widest + 1, reso_steps):
        height = min(max_size, max_area // width // reso_steps * reso_steps)
        if height >= min_size:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


class SettingNames(NamedTuple):
    """What messages call the settings."""

    min_size: str = "min_size"
    max_size: str = "max_size"
    reso_steps: str = "reso_steps"
    no_upscale: str = "no_upscale"


_OWN_NAMES = SettingNames()
_DEFAULTS = {
    "max_reso": None, "min_size": 256, "max_size": None, "reso_steps": 64, "no_upscale": False,
    "switching": "midpoint", "no_upscale_fit": "kohya", "max_crop": None,
}  # fmt: skip
_NAMES = tuple(_DEFAULTS)


class KohyaBuckets(RuleBase):
    """sd-scripts' buckets.

    Args:
        max_reso: (width, height) in pixels whose area no bucket exceeds; an int means a square.
        min_size: shortest side of a bucket; with `no_upscale` it counts for the fit `standard` only.
        max_size: longest side of a bucket, the same. By default twice the side of a square of that area, and not below
            1024. sd-scripts' own default is 1024 at every resolution; ordinary aspects lose pixels with it at a
            resolution of 1024.
        reso_steps: every side is a multiple of this.
        no_upscale: never enlarge; the bucket is the image's own size, reduced to the area if it is
            larger, floored to the step (`bucket_no_upscale`).
        switching: where buckets hand over: `midpoint` is what sd-scripts does; `geometric` and `area` are
            explained at `kohya_bucket.buckets.switching_points`.
        no_upscale_fit: `kohya`, or `largest`: with `no_upscale`, the largest size that crops no larger share
            than Kohya's bucket (3072x3000 at 1024 gets 1024x1024, not 960x960); or `standard`: the bucket without
            `no_upscale` where an image fills it, else its own size, floored to the step.
        max_crop: the largest share of an image that may be cropped off, e.g. 0.05. An image above it moves to a
            bucket within it, and has none (`Reason.CROP_LIMIT`) where there is no such bucket.

    Raises:
        BucketSettingsError: values from which no training could follow; says which and what to change, by the names of
            the keys in a dataset config.

    Examples:
        >>> rule = KohyaBuckets.for_arch("sdxl")  # or KohyaBuckets(1024)
        >>> rule.assign(4000, 3000)
        Bucket(width=1152, height=896)
        >>> placement = rule.place([(4000, 3000), (1000, 1500)])
        >>> placement.bucket_sizes.tolist()
        [[1152, 896], [832, 1216]]
        >>> placement.crop_loss.round(3).tolist()
        [0.036, 0.026]
    """

    def __init__(
        self,
        max_reso: tuple[int, int] | int,
        min_size: int = 256,
        max_size: int | None = None,
        reso_steps: int = 64,
        no_upscale: bool = False,
        *,
        switching: str = "midpoint",
        no_upscale_fit: str = "kohya",
        max_crop: float | None = None,
    ) -> None:
        width, height = as_resolution("resolution", max_reso)
        self.max_reso = (width, height)
        self.max_area = width * height
        self.min_size = as_whole("min_size", min_size)
        self.reso_steps = as_whole("reso_steps", reso_steps)
        longest = longest_side(self.max_reso, self.reso_steps) if max_size is None else max_size
        self.max_size = as_whole("max_size", longest)
        self.no_upscale = as_flag("no_upscale", no_upscale, BucketSettingsError)
        self.switching = switching
        self.no_upscale_fit = no_upscale_fit
        self.max_crop = check_max_crop(max_crop)
        check_settings(
            self.max_reso, self.min_size, self.max_size, self.reso_steps, self.no_upscale, self.no_upscale_fit
        )
        one_of("switching", self.switching, SWITCHING_METHODS, BucketSettingsError)
        self.usual: KohyaBuckets | None = None  # whose buckets the fit `standard` tries first
        if no_upscale_fit == "standard":
            self.usual = self.changed(no_upscale=False, no_upscale_fit="kohya", max_crop=None)
        if not self.no_upscale:
            self._bucket_set = BucketSet.from_dims(
                kohya_bucket_sizes(self.max_reso, self.min_size, self.max_size, self.reso_steps),
                name=f"kohya-{width}x{height}",
                description=f"sd-scripts, sides {self.min_size}..{self.max_size} in steps of {self.reso_steps}",
            )
            self._switch = aspect_switch(self._bucket_set, switching)
            self._limits = Limits(self._bucket_set, max_crop=self.max_crop, no_upscale=False)

    @classmethod
    def for_arch(cls, arch: str, **changed: Any) -> KohyaBuckets:
        """With what people set for a model family, e.g. "sdxl" or "flux", and other values where they are given.

        Raises:
            ConfigError: there is no such family, with the nearest.
        """
        from kohya_bucket.buckets.families import family_named

        usual = family_named(arch)
        return cls(usual.resolution, usual.min_size, usual.max_size, usual.reso_steps).changed(**changed)

    def _assign(self, sizes: IntArray) -> Assignment:
        if self._bucket_set is not None:
            return nearest_within(sizes, self._bucket_set, self._switch, self._limits)
        own = without_upscaling(sizes, self.max_area, self.reso_steps)  # exactly as sd-scripts has it
        if self.usual is not None:
            own = usual_where_filled(own, self.usual.place(sizes), self.max_area)
        largest = self.no_upscale_fit == "largest"
        if largest or self.max_crop is not None:
            return corrected_without_upscaling(own, self.max_area, largest, self.max_crop)
        return own

    def changed(self, **values: Any) -> KohyaBuckets:
        """The rule with other values. `BucketSettingsError` where they cannot work."""
        known_keyword("KohyaBuckets", values, _NAMES)
        return KohyaBuckets(**{name: getattr(self, name) for name in _NAMES} | values)

    def __repr__(self) -> str:
        limits = f"min_size={self.min_size}, max_size={self.max_size}, reso_steps={self.reso_steps}"
        options = "".join(f", {k}={getattr(self, k)!r}" for k in _NAMES[4:] if getattr(self, k) != _DEFAULTS[k])
        return f"KohyaBuckets({self.max_reso}, {limits}{options})"


def kohya_rule(request: RuleRequest) -> KohyaBuckets:
    """`kohya`."""
    limits = request.min_size, request.max_size, request.reso_steps
    return KohyaBuckets(request.max_reso, *limits, no_upscale_fit=request.no_upscale_fit, **request.set_options)


def check_settings(
    max_reso: tuple[int, int], min_size: int, max_size: int, reso_steps: int, no_upscale: bool = False,
    no_upscale_fit: str = "kohya", names: SettingNames = _OWN_NAMES,
) -> None:  # fmt: skip
    """Refuse settings from which no buckets follow, with `BucketSettingsError`."""
    width, height = max_reso
    if min(width, height) < 1:
        raise BucketSettingsError(f"resolution is {width}x{height}, but both sides must be 1 or more")
    check_steps(reso_steps, names.reso_steps)
    if width * height < reso_steps * reso_steps:
        raise BucketSettingsError(
            f"resolution {width}x{height} is smaller than one bucket step of {reso_steps}: "
            f"no bucket fits; raise the resolution or lower {names.reso_steps}"
        )
    one_of("no_upscale_fit", no_upscale_fit, NO_UPSCALE_FITS, BucketSettingsError)
    if no_upscale and no_upscale_fit != "standard":
        return
    if not no_upscale and no_upscale_fit != "kohya":
        raise BucketSettingsError(
            f"no_upscale_fit is {no_upscale_fit!r}, but upscaling is on, so nothing would follow from it: "
            f"set {names.no_upscale}, or leave no_upscale_fit out"
        )
    for name, value, fixed in (
        (names.min_size, min_size, min_size - min_size % reso_steps),
        (names.max_size, max_size, max_size + -max_size % reso_steps),
    ):
        if value < 1 or value % reso_steps:
            raise BucketSettingsError(
                f"{name} is {value}, which is not a positive multiple of {names.reso_steps} {reso_steps}: every side "
                f"of a bucket must be one; use {max(fixed, reso_steps)}"
            )
    if min_size > max_size:
        raise BucketSettingsError(
            f"{names.min_size} {min_size} is above {names.max_size} {max_size}, both in steps of {reso_steps}, so that "
            "no side fits: lower the one or raise the other"
        )
    if min(width, height) < min_size:
        raise BucketSettingsError(
            f"{names.min_size} {min_size} is above the shorter side of resolution {width}x{height}: "
            f"set {names.min_size} to {min(width, height) // reso_steps * reso_steps or reso_steps} or raise the "
            "resolution"
        )
    if max(width, height) > max_size:
        raise BucketSettingsError(
            f"{names.max_size} {max_size} is below the longer side of resolution {width}x{height}: "
            f"set {names.max_size} to {max(width, height) + -max(width, height) % reso_steps} or lower the resolution"
        )
