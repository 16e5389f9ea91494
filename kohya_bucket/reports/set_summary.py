"""A few numbers on a data set and a bucket set, for notebooks: from sizes alone, without files or a rule.

They have the names, arguments and values of the package bucketsampler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kohya_bucket.buckets import Bucket, BucketSet, assign_many_indices
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.sizes import FloatArray, readable_sizes
from kohya_bucket.errors import BucketSettingsError

__all__ = [
    "AspectRatioSummary",
    "CropLossSummary",
    "aspect_ratio_summary",
    "bucket_distribution",
    "crop_loss_summary",
    "underutilized_buckets",
]


@dataclass(frozen=True)
class AspectRatioSummary:
    """Aspects (width / height) of `count` images, and their natural logarithms; all NaN where there are none."""

    count: int
    mean_log_ar: float
    median_log_ar: float
    std_log_ar: float
    min_ar: float
    max_ar: float


@dataclass(frozen=True)
class CropLossSummary:
    """Shares of `count` images that are cut off, each in [0, 1); all NaN where there are none."""

    count: int
    mean: float
    median: float
    p95: float
    max: float


def aspect_ratio_summary(dims: Any) -> AspectRatioSummary:
    """Of [N, 2] sizes (width, height).

    Raises:
        KohyaBucketError: another shape, or a side below 1.
    """
    aspects = _aspects(dims)
    if not len(aspects):
        return AspectRatioSummary(0, *[math.nan] * 5)
    logs = np.log(aspects)
    return AspectRatioSummary(
        len(aspects), float(logs.mean()), float(np.median(logs)), float(logs.std()), float(aspects.min()),
        float(aspects.max()),
    )  # fmt: skip


def crop_loss_summary(dims: Any, bucket_set: BucketSet) -> CropLossSummary:
    """Of [N, 2] sizes (width, height), each in the bucket that `FixedBuckets(bucket_set)` gives it.

    Raises:
        KohyaBucketError: another shape, a side below 1, or no bucket set.
    """
    aspects, index = _aspects(dims), assign_many_indices(dims, bucket_set)
    if not len(aspects):
        return CropLossSummary(0, *[math.nan] * 4)
    loss = aspect_loss(bucket_set.aspects[index], aspects)
    return CropLossSummary(
        len(loss), float(loss.mean()), float(np.median(loss)), float(np.percentile(loss, 95)), float(loss.max())
    )


def bucket_distribution(dims: Any, bucket_set: BucketSet) -> dict[Bucket, int]:
    """Images of each bucket, in the set's order; those without any are in it, too. Errors as `crop_loss_summary`."""
    counts = np.bincount(assign_many_indices(dims, bucket_set), minlength=len(bucket_set))
    return dict(zip(bucket_set, counts.tolist(), strict=True))


def underutilized_buckets(dims: Any, bucket_set: BucketSet, *, min_count: int) -> list[Bucket]:
    """Buckets with fewer than `min_count` images, empty ones included, in the set's order.

    Raises:
        BucketSettingsError: `min_count` is below 0; others as `crop_loss_summary`.
    """
    if min_count < 0:
        raise BucketSettingsError(f"min_count is {min_count}, but must be 0 or more")
    return [bucket for bucket, count in bucket_distribution(dims, bucket_set).items() if count < min_count]


def _aspects(dims: Any) -> FloatArray:
    sizes = readable_sizes(dims)
    return np.asarray(sizes[:, 0] / sizes[:, 1])
