"""Kohya's rule: the buckets of sd-scripts, and which one an image gets.

Source: kohya-ss/sd-scripts, `model_util.make_bucket_resolutions` and `BucketManager.select_bucket`,
unchanged from 0.8.7 to 0.10.1. Results are equal row by row, floats included.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.chunks import for_chunks
from kohya_bucket.buckets.distinct import SizeGrid, distinct_sizes
from kohya_bucket.buckets.placing import Outputs, place_into_set, single
from kohya_bucket.buckets.refit import refit
from kohya_bucket.buckets.restrict import Limits, check_max_crop, nearest_within
from kohya_bucket.buckets.switching import aspect_switch
from kohya_bucket.buckets.types import Bucket, BucketSet, FloatArray, IntArray, Placement, Reason, as_sizes
from kohya_bucket.errors import BucketSettingsError

__all__ = ["NO_UPSCALE_FITS", "KohyaBuckets", "kohya_bucket_sizes", "place_without_upscaling"]

Rows = npt.NDArray[np.bool_]
NO_UPSCALE_FITS = ("kohya", "largest")


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
    for width in range(min_size, max_size + 1, reso_steps):
        height = min(max_size, max_area // width // reso_steps * reso_steps)
        if height >= min_size:
            sizes |= {(width, height), (height, width)}
    return sorted(sizes)


class KohyaBuckets:
    """sd-scripts' buckets.

    Args:
        max_reso: (width, height) in pixels whose area no bucket exceeds; an int means a square.
        min_size: shortest side of a bucket; ignored with `no_upscale`.
        max_size: longest side of a bucket; ignored with `no_upscale`.
        reso_steps: every side is a multiple of this.
        no_upscale: never enlarge; the bucket is the image's own size, reduced to the area if it is
            larger, floored to the step (`bucket_no_upscale`).
        switching: where buckets hand over: `midpoint` is what sd-scripts does; `geometric` and `area` are
            explained at `kohya_bucket.switching_points`.
        no_upscale_fit: `kohya`, or `largest`: with `no_upscale`, the largest size that crops no larger share
            than Kohya's bucket (3072x3000 at 1024 gets 1024x1024, not 960x960).
        max_crop: the largest share of an image that may be cropped off, e.g. 0.05. An image above it moves to a
            bucket within it, and has none (`Reason.CROP_LIMIT`) where there is no such bucket.

    Raises:
        BucketSettingsError: settings from which no training could follow; says which and what to change.
    """

    def __init__(
        self,
        max_reso: tuple[int, int] | int,
        min_size: int = 256,
        max_size: int = 1024,
        reso_steps: int = 64,
        no_upscale: bool = False,
        *,
        switching: str = "midpoint",
        no_upscale_fit: str = "kohya",
        max_crop: float | None = None,
    ) -> None:
        width, height = (max_reso, max_reso) if isinstance(max_reso, int) else map(int, max_reso)
        self.max_reso = (width, height)
        self.max_area = width * height
        self.min_size = int(min_size)
        self.max_size = int(max_size)
        self.reso_steps = int(reso_steps)
        self.no_upscale = bool(no_upscale)
        self.switching = switching
        self.no_upscale_fit = no_upscale_fit
        self.max_crop = check_max_crop(max_crop)
        _check_settings(self)
        self._bucket_set: BucketSet | None = None
        if not self.no_upscale:
            self._bucket_set = BucketSet.from_dims(
                kohya_bucket_sizes(self.max_reso, self.min_size, self.max_size, self.reso_steps),
                name=f"kohya-{width}x{height}",
                description=f"sd-scripts, sides {min_size}..{max_size} in steps of {reso_steps}",
            )
            self._switch = aspect_switch(self._bucket_set, switching)
            self._limits = Limits(self._bucket_set, max_crop=self.max_crop, no_upscale=False)

    @property
    def bucket_set(self) -> BucketSet | None:
        """The generated set; None with `no_upscale`, where the images themselves decide."""
        return self._bucket_set

    def place(self, sizes: Any) -> Placement:
        """Place N images. `sizes` is [N, 2] (width, height) in pixels; rows with a side < 1 count as unreadable."""
        array = as_sizes(sizes)
        if self._bucket_set is not None:
            index, reasons = nearest_within(array, self._bucket_set, self._switch, self._limits)
            return place_into_set(array, self._bucket_set, index, reasons)
        plain = place_without_upscaling(array, self.max_area, self.reso_steps)
        if self._plain:
            return plain
        return refit(array, plain, self.max_area, self.reso_steps, self.no_upscale_fit == "largest", self.max_crop)

    def assign(self, width: int, height: int) -> Bucket:
        """The bucket of one image. `ValueError` with the reason if it has none."""
        return single(self, width, height)

    def assign_many_indices(self, sizes: Any) -> IntArray:
        """[N] int32 positions in `bucket_set` (with `no_upscale`: in `place(sizes).bucket_set`); -1 for none."""
        if self._bucket_set is None:
            if self._plain:
                return _indices_without_upscaling(as_sizes(sizes), self.max_area, self.reso_steps)
            return self.place(sizes).bucket_index
        return nearest_within(as_sizes(sizes), self._bucket_set, self._switch, self._limits)[0]

    @property
    def _plain(self) -> bool:
        """No-upscale mode exactly as sd-scripts has it."""
        return self.max_crop is None and self.no_upscale_fit == "kohya"

    def __repr__(self) -> str:
        limits = f"min_size={self.min_size}, max_size={self.max_size}, reso_steps={self.reso_steps}"
        defaults = {"no_upscale": False, "switching": "midpoint", "no_upscale_fit": "kohya", "max_crop": None}
        options = "".join(f", {k}={getattr(self, k)!r}" for k, v in defaults.items() if getattr(self, k) != v)
        return f"KohyaBuckets({self.max_reso}, {limits}{options})"


def place_without_upscaling(sizes: IntArray, max_area: int, reso_steps: int) -> Placement:
    """Place [N, 2] int32 sizes in no-upscale mode: the bucket is the (reduced) size floored to the step."""
    n = len(sizes)
    bucket_sizes, resized_sizes = np.empty((n, 2), dtype=np.int32), np.empty((n, 2), dtype=np.int32)
    reasons = np.empty(n, dtype=np.uint8)
    out = Outputs(n)
    grid = _grid(n, max_area, reso_steps)

    def work(start: int, stop: int) -> None:
        rows = sizes[start:stop]
        width, height, aspect, reasons[start:stop] = _no_upscale_resize(rows, max_area, reso_steps)
        bucket_width, bucket_height = (_whole_steps(side, reso_steps) for side in (width, height))
        if grid is not None:
            grid.mark(start, stop, bucket_width, bucket_height, reasons[start:stop] == Reason.PLACED)
        bucket_width *= reso_steps
        bucket_height *= reso_steps
        resized_sizes[start:stop, 0], resized_sizes[start:stop, 1] = width, height
        bucket_sizes[start:stop, 0], bucket_sizes[start:stop, 1] = bucket_width, bucket_height
        missing = reasons[start:stop] != Reason.PLACED
        any_missing = bool(missing.any())
        if any_missing:
            for column in (width, height, bucket_width, bucket_height):
                column[missing] = 1
        out.fill(start, stop, bucket_width, bucket_height, bucket_width / bucket_height, aspect, width, height)
        if any_missing:
            bucket_sizes[start:stop][missing] = resized_sizes[start:stop][missing] = 0
            out.clear(start, stop, missing)

    for_chunks(n, work)
    if grid is not None:
        bucket_set, index = grid.result()
    else:
        bucket_set, index = distinct_sizes(bucket_sizes, reasons == Reason.PLACED, reso_steps)
    return Placement(
        bucket_set, index, bucket_sizes, resized_sizes, out.crop_ltrb, out.aspect_errors, out.crop_loss, reasons
    )  # fmt: skip


def _indices_without_upscaling(sizes: IntArray, max_area: int, reso_steps: int) -> IntArray:
    """Only `bucket_index` of `place_without_upscaling`."""
    n = len(sizes)
    grid = _grid(n, max_area, reso_steps)
    if grid is None:
        return place_without_upscaling(sizes, max_area, reso_steps).bucket_index

    def work(start: int, stop: int) -> None:
        width, height, aspect, too_large, unreadable = _shapes(sizes[start:stop], max_area)
        bucket_width, bucket_height = _whole_steps(width, reso_steps), _whole_steps(height, reso_steps)
        if too_large is not None:
            reduced = _Reduced(aspect, max_area, reso_steps)
            for bucket, steps in ((bucket_width, reduced.bucket_width), (bucket_height, reduced.bucket_height)):
                np.copyto(bucket, _whole_steps(steps, reso_steps), where=too_large)
        placed = np.minimum(bucket_width, bucket_height) >= 1
        if unreadable is not None:
            placed &= ~unreadable
        grid.mark(start, stop, bucket_width, bucket_height, placed)

    for_chunks(n, work)
    return grid.result()[1]


def _grid(n: int, max_area: int, steps: int) -> SizeGrid | None:
    """A table for the no-upscale buckets of `n` images; None where it would be too large.

    A side is bounded by the other, which is a step at least: an image within the area is no longer than
    area / step. A reduced one was rounded by half a pixel on each side and, through the aspect, once more.
    """
    short = steps - 0.5
    side = int(max_area / short * (1 + 0.5 / short) / steps) + 3
    return SizeGrid(n, side, side, steps) if SizeGrid.fits(n, side, side) else None


def _no_upscale_resize(
    sizes: IntArray, max_area: int, steps: int
) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.uint8]]:
    """What no-upscale mode scales each image to: widths, heights (0 where unreadable), image aspects, reasons."""
    width, height, aspect, too_large, unreadable = _shapes(sizes, max_area)
    if too_large is not None:
        reduced = _Reduced(aspect, max_area, steps)
        np.copyto(width, reduced.width, where=too_large)
        np.copyto(height, reduced.height, where=too_large)
    reasons = np.where(np.minimum(width, height) < steps, np.uint8(Reason.TOO_SMALL), np.uint8(Reason.PLACED))
    if unreadable is not None:
        width[unreadable] = height[unreadable] = 0
        reasons[unreadable] = Reason.UNREADABLE
    return width, height, aspect, reasons


def _shapes(sizes: IntArray, max_area: int) -> tuple[FloatArray, FloatArray, FloatArray, Rows | None, Rows | None]:
    """Widths, heights, aspects, and which rows are above the area and which unreadable (1x1 here); None for none."""
    width, height = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    unreadable = np.minimum(width, height) < 1
    some_unreadable = bool(unreadable.any())
    if some_unreadable:
        width[unreadable] = height[unreadable] = 1
    too_large = width * height > max_area
    some_large = bool(too_large.any())
    return width, height, width / height, too_large if some_large else None, unreadable if some_unreadable else None


def _whole_steps(x: FloatArray, steps: int) -> FloatArray:
    """How many whole steps are in x >= 0, as doubles: exact below 2**53, and much faster than integers."""
    # For a power of two multiplying by the inverse is exact as well.
    out = x * (1 / steps) if steps & (steps - 1) == 0 else x / steps
    return np.floor(out, out=out)


def _floor_to_multiple(x: FloatArray, steps: int) -> FloatArray:
    """Whole multiples of `steps` at or below x >= 0."""
    out = _whole_steps(x, steps)
    out *= steps
    return out


class _Reduced:
    """Images scaled to the area: either side floored to the step, of the two the one with less aspect error."""

    def __init__(self, aspect: FloatArray, max_area: int, steps: int) -> None:
        def floor_to_steps(x: FloatArray) -> FloatArray:
            whole = x + 0.5
            return _floor_to_multiple(np.floor(whole, out=whole), steps)

        ideal_width = np.sqrt(max_area * aspect)
        self._by_width = floor_to_steps(ideal_width)
        self._by_height = floor_to_steps(max_area / ideal_width)
        self._height_exact, self._width_exact = self._by_width / aspect, self._by_height * aspect
        self._height_of_width = floor_to_steps(self._height_exact)
        self._width_of_height = floor_to_steps(self._width_exact)
        # A candidate that floors to 0 ends as a division by zero in sd-scripts, whichever candidate it is.
        dead = np.minimum(self._height_of_width, self._by_height) == 0
        self._dead = dead if dead.any() else None
        if self._dead is not None:
            self._height_of_width[dead] = self._by_height[dead] = 1
        error_by_width = np.abs(self._by_width / self._height_of_width - aspect)
        self._take_width = error_by_width < np.abs(self._width_of_height / self._by_height - aspect)

    @property
    def width(self) -> FloatArray:
        return self._choose(self._by_width, np.floor(self._width_exact + 0.5))

    @property
    def height(self) -> FloatArray:
        return self._choose(np.floor(self._height_exact + 0.5), self._by_height)

    @property
    def bucket_width(self) -> FloatArray:
        """`width`, floored to the step."""
        return self._choose(self._by_width, self._width_of_height)

    @property
    def bucket_height(self) -> FloatArray:
        """`height`, floored to the step."""
        return self._choose(self._height_of_width, self._by_height)

    def _choose(self, by_width: FloatArray, by_height: FloatArray) -> FloatArray:
        out = np.where(self._take_width, by_width, by_height)
        if self._dead is not None:
            out[self._dead] = 0
        return out


def _check_settings(rule: KohyaBuckets) -> None:
    width, height = rule.max_reso
    steps, low, high = rule.reso_steps, rule.min_size, rule.max_size
    if min(width, height) < 1:
        raise BucketSettingsError(f"resolution is {width}x{height}, but both sides must be 1 or more")
    if steps < 1:
        raise BucketSettingsError(f"bucket_reso_steps is {steps}, but must be 1 or more; 64 is usual")
    if rule.max_area < steps * steps:
        raise BucketSettingsError(
            f"resolution {width}x{height} is smaller than one bucket step of {steps}: "
            f"no bucket fits; raise the resolution or lower bucket_reso_steps"
        )
    if rule.no_upscale_fit not in NO_UPSCALE_FITS:
        raise BucketSettingsError(
            f"no_upscale_fit is {rule.no_upscale_fit!r}, which does not exist; take one of {', '.join(NO_UPSCALE_FITS)}"
        )
    if rule.no_upscale:
        return
    if rule.no_upscale_fit != "kohya":
        raise BucketSettingsError(
            f"no_upscale_fit is {rule.no_upscale_fit!r}, but upscaling is on, so nothing would follow from it: "
            f"set bucket_no_upscale, or leave no_upscale_fit out"
        )
    for name, value, fixed in (
        ("min_bucket_reso", low, low - low % steps),
        ("max_bucket_reso", high, high + -high % steps),
    ):
        if value < 1 or value % steps:
            raise BucketSettingsError(
                f"{name} is {value}, which is no positive multiple of bucket_reso_steps {steps}: every side of a "
                f"bucket must be one; use {max(fixed, steps)}"
            )
    if low > high:
        raise BucketSettingsError(
            f"min_bucket_reso {low} is above max_bucket_reso {high}: no side fits between; swap them"
        )
    if min(width, height) < low:
        raise BucketSettingsError(
            f"min_bucket_reso {low} is above the shorter side of resolution {width}x{height}: "
            f"lower it to {min(width, height) // steps * steps or steps} or raise the resolution"
        )
    if max(width, height) > high:
        raise BucketSettingsError(
            f"max_bucket_reso {high} is below the longer side of resolution {width}x{height}: "
            f"raise it to {max(width, height) + -max(width, height) % steps} or lower the resolution"
        )
