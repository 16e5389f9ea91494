"""The nearest bucket of a set, and what it cuts off, as plain functions on sizes.

They have the names and arguments of the package bucketsampler.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, overload

import numpy as np

from kohya_bucket.buckets.bucket import Bucket, BucketSet
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.rules.fixed import FixedBuckets, check_bucket_set
from kohya_bucket.buckets.sizes import FloatArray, IntArray, readable_sizes

__all__ = ["assign_many", "assign_many_indices", "best_bucket", "crop_loss"]


def best_bucket(width: int, height: int, bucket_set: BucketSet) -> Bucket:
    """The bucket that `FixedBuckets(bucket_set)` gives one image: the nearest in log aspect.

    Raises:
        ValueError: a side below 1, or an image that cannot be scaled to any bucket.
    """
    return _rule(check_bucket_set(bucket_set)).assign(width, height)


def assign_many_indices(dims: Any, bucket_set: BucketSet) -> IntArray:
    """[N] int32 positions in `bucket_set`, for [N, 2] (width, height) in pixels.

    Raises:
        ValueError: as `best_bucket`.
    """
    rule, sizes = _rule(check_bucket_set(bucket_set)), readable_sizes(dims)
    index = rule.assign_many_indices(sizes)
    if index.min(initial=0) < 0:
        rule.assign(*sizes[int(index.argmin())].tolist())  # says why there is none
    return index


def assign_many(dims: Iterable[Any], bucket_set: BucketSet) -> list[Bucket]:
    """The bucket of each image, for N pairs (width, height). Errors as `assign_many_indices`."""
    sizes = dims if hasattr(dims, "__len__") else list(dims)
    return [bucket_set[k] for k in assign_many_indices(sizes, bucket_set).tolist()]


@overload
def crop_loss(width: int, height: int, bucket: Bucket) -> float: ...
@overload
def crop_loss(width: IntArray, height: IntArray, bucket: Bucket) -> FloatArray: ...
def crop_loss(width: int | IntArray, height: int | IntArray, bucket: Bucket) -> float | FloatArray:
    """Share of an image that is cut off when it is scaled to cover `bucket`, in [0, 1); sides are numbers or [N].

    It follows from the two aspects; `Placement.crop_loss` is that of the image resized to whole pixels.

    Raises:
        BucketSettingsError: a side below 1.
    """
    sizes = readable_sizes(np.stack([np.atleast_1d(width), np.atleast_1d(height)], axis=1))
    loss = aspect_loss(np.float64(bucket.aspect_ratio), sizes[:, 0] / sizes[:, 1])
    return loss if np.ndim(width) else float(loss[0])


@lru_cache(maxsize=8)
def _rule(bucket_set: BucketSet) -> FixedBuckets:
    """Where buckets hand over takes a thousand times as long to find as one image's bucket."""
    return FixedBuckets(bucket_set)
