"""A given bucket set: each image takes the bucket of the nearest aspect."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.limits import Limits, nearest_within
from kohya_bucket.buckets.rule import InSet, SetRule
from kohya_bucket.buckets.rules.registry import RuleRequest
from kohya_bucket.buckets.set_files import load_from_json, load_from_toml, load_preset
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.buckets.switching import aspect_switch
from kohya_bucket.errors import BucketSettingsError


class FixedBuckets(SetRule):
    """Nearest bucket of a fixed set, by default in log aspect, as in bucketsampler's class of this name.

    An image of exactly a bucket's size takes that bucket, also where the set holds its aspect twice.

    Args:
        bucket_set: the buckets; at a tie the first in set order is taken.
        switching: `geometric` (nearest log aspect), `midpoint` (nearest aspect) or `area`; see
            `kohya_bucket.buckets.switching_points`.
        no_upscale: use only buckets that are no larger than the image in either side.
        max_crop: the largest share of an image that may be cropped off, e.g. 0.05. An image above it moves to
            the bucket that crops it least, and has none (`Reason.CROP_LIMIT`) if that is above it, too.

    Raises:
        BucketSettingsError: no bucket set, an unknown method or a `max_crop` that is not a share.

    Examples:
        >>> rule = FixedBuckets(load_preset("sdxl"), max_crop=0.05)
        >>> rule.assign(1920, 1080)
        Bucket(width=1344, height=768)
        >>> rule.place([(1920, 1080), (5000, 1000)]).bucket_index.tolist()
        [5, -1]
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
        self.no_upscale, self.max_crop = self._limits.no_upscale, self._limits.max_crop

    def _assign(self, sizes: IntArray) -> InSet:
        return nearest_within(sizes, self.bucket_set, self._switch, self._limits)

    def __repr__(self) -> str:
        name = f" {self.bucket_set.name!r}" if self.bucket_set.name else ""
        return f"<{type(self).__name__}{name} n_buckets={len(self.bucket_set)} switching={self.switching!r}>"


def check_bucket_set(bucket_set: BucketSet) -> BucketSet:
    """The set itself; `BucketSettingsError` for a list, a name, or anything else that is not a `BucketSet`."""
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


class OneBucket(SetRule):
    """`enable_bucket = false`: every image goes to the dataset's resolution, whatever its aspect."""

    def __init__(self, resolution: tuple[int, int]) -> None:
        super().__init__(BucketSet.from_dims([resolution], name="no bucketing"))

    def _assign(self, sizes: IntArray) -> InSet:
        readable = sizes.min(axis=1, initial=1) > 0
        return InSet(sizes, self.bucket_set, np.where(readable, 0, -1).astype(np.int32))

    def __repr__(self) -> str:
        return f"OneBucket({self.bucket_set[0]})"
