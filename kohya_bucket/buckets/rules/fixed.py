"""A given bucket set: each image takes the bucket of the nearest aspect."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays.build_placement import place_into_set
from kohya_bucket.buckets.bucket import Bucket, BucketSet
from kohya_bucket.buckets.limits import Limits, nearest_within
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.rule import place_one
from kohya_bucket.buckets.sizes import IntArray, as_sizes
from kohya_bucket.buckets.switching import aspect_switch
from kohya_bucket.errors import BucketSettingsError

__all__ = ["FixedBuckets"]


class FixedBuckets:
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
        if not isinstance(bucket_set, BucketSet):
            raise BucketSettingsError(
                f"bucket_set is {bucket_set!r}, but must be a BucketSet: load_preset('sdxl'), load_from_toml(path), or "
                "BucketSet.from_dims([(width, height), ...])"
            )
        self._bucket_set = bucket_set
        self.switching = switching
        self._switch = aspect_switch(bucket_set, switching)
        self._limits = Limits(bucket_set, max_crop=max_crop, no_upscale=no_upscale)

    @property
    def bucket_set(self) -> BucketSet:
        return self._bucket_set

    @property
    def no_upscale(self) -> bool:
        return self._limits.no_upscale

    @property
    def max_crop(self) -> float | None:
        return self._limits.max_crop

    def place(self, sizes: Any) -> Placement:
        """Place N images. `sizes` is [N, 2] (width, height) in pixels; rows with a side < 1 count as unreadable."""
        array = as_sizes(sizes)
        index, reasons = self._decide(array)
        return place_into_set(array, self._bucket_set, index, reasons)

    def assign(self, width: int, height: int) -> Bucket:
        """The bucket of one image. `ValueError` with the reason if it has none."""
        return place_one(self, width, height)

    def assign_many_indices(self, sizes: Any) -> IntArray:
        """[N] int32 positions in `bucket_set`; -1 for none."""
        return self._decide(as_sizes(sizes))[0]

    def _decide(self, sizes: IntArray) -> tuple[IntArray, npt.NDArray[np.uint8] | None]:
        return nearest_within(sizes, self._bucket_set, self._switch, self._limits)

    def __repr__(self) -> str:
        name = f" {self._bucket_set.name!r}" if self._bucket_set.name else ""
        return f"<{type(self).__name__}{name} n_buckets={len(self._bucket_set)} switching={self.switching!r}>"
