"""A given bucket set: each image takes the bucket of the nearest aspect."""

from __future__ import annotations

from pathlib import Path

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.decision import InSet
from kohya_bucket.buckets.limits import Limits, nearest_within
from kohya_bucket.buckets.presets import load_preset
from kohya_bucket.buckets.rule import SetRule
from kohya_bucket.buckets.rules.request import RuleRequest
from kohya_bucket.buckets.set_files import load_from_json, load_from_toml
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.buckets.switching import aspect_switch
from kohya_bucket.errors import BucketSettingsError

__all__ = ["FixedBuckets", "check_bucket_set", "file_rule", "preset_rule"]


class FixedBuckets(SetRule):
    """Nearest bucket of a fixed set, by default in log aspect, as in bucketsampler's class of this name.

    An image of exactly a bucket's size takes that bucket, also where the set holds its aspect twice.

    Args:
        bucket_set: the buckets; at a tie the first in set order is taken.
        switching: `geometric` (nearest log aspect), `midpoint` (nearest aspect) or `area`; see
            `kohya_bucket.switching_points`.
        no_upscale: use only buckets that are no larger than the image in either side.
        max_crop: the largest share of an image that may be cropped off, e.g. 0.05. An image above it moves to
            the bucket that crops it least, and has none (`Reason.CROP_LIMIT`) if that is above it, too.

    Raises:
        BucketSettingsError: no bucket set, an unknown method or a `max_crop` that is no share.
    """

    def __init__(
        self,
        bucket_set: BucketSet,
        *,
        switching: str = "geometric",
        no_upscale: bool = False,
        max_crop: float | None = None,
    ) -> None:
        super().__init__(check_bucket_set(bucket_set))
        self.switching = switching
        self._switch = aspect_switch(bucket_set, switching)
        self._limits = Limits(bucket_set, max_crop=max_crop, no_upscale=no_upscale)

    @property
    def no_upscale(self) -> bool:
        return self._limits.no_upscale

    @property
    def max_crop(self) -> float | None:
        return self._limits.max_crop

    def _decide(self, sizes: IntArray) -> InSet:
        return nearest_within(sizes, self.bucket_set, self._switch, self._limits)

    def __repr__(self) -> str:
        name = f" {self.bucket_set.name!r}" if self.bucket_set.name else ""
        return f"<{type(self).__name__}{name} n_buckets={len(self.bucket_set)} switching={self.switching!r}>"


def check_bucket_set(bucket_set: BucketSet) -> BucketSet:
    """The set itself.

    Raises:
        BucketSettingsError: it is a list, a name, or anything else that is none.
    """
    if isinstance(bucket_set, BucketSet):
        return bucket_set
    raise BucketSettingsError(
        f"bucket_set is {bucket_set!r}, but must be a BucketSet: load_preset('sdxl'), load_from_toml(path), or "
        "BucketSet.from_dims([(width, height), ...])"
    )


def preset_rule(request: RuleRequest) -> FixedBuckets:
    """`preset:NAME`."""
    return FixedBuckets(load_preset(request.argument), **request.set_options)


def file_rule(request: RuleRequest) -> FixedBuckets:
    """`file:PATH`: TOML, or JSON by its suffix."""
    load = load_from_json if Path(request.argument).suffix.lower() == ".json" else load_from_toml
    return FixedBuckets(load(request.argument), **request.set_options)
