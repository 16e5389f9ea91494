"""A data set, a bucket set and a placement in few numbers.

`Summary` is what two placements of the same images are compared by. The rest is for notebooks, from sizes alone,
without files or a rule: it has the names, arguments and values of the package bucketsampler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kohya_bucket.buckets import Bucket, BucketSet, Placement, assign_many_indices
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.misfits import BARELY, enlargement
from kohya_bucket.buckets.sizes import FloatArray, IntArray, readable_sizes
from kohya_bucket.errors import BucketSettingsError
from kohya_bucket.planning.plan import BucketCounts


@dataclass(frozen=True)
class Summary:
    """A placement of N images in numbers.

    Attributes:
        placed, unplaced: readable images with and without a bucket.
        buckets: buckets in use.
        samples, batches, short_batches: of one epoch on one process; a batch that is not full is short.
        mean_crop, median_crop, p95_crop, worst_crop: share of an image's area that is cropped off; 0 where nothing is
            placed.
        enlarged: share of the placed images that are scaled up by more than rounding (0.1% of a side).
        mean_pixels: mean area of the buckets over the placed images.
    """

    placed: int
    unplaced: int
    buckets: int
    samples: int
    batches: int
    short_batches: int
    mean_crop: float
    median_crop: float
    p95_crop: float
    worst_crop: float
    enlarged: float
    mean_pixels: float


def summarize(sizes: IntArray, placement: Placement, counts: BucketCounts) -> Summary:
    """Numbers of one placement; `sizes` [N, 2], `counts` what an epoch trains of its buckets."""
    placed = placement.placed
    readable = sizes.min(axis=1, initial=1) > 0
    loss = placement.crop_loss[placed]
    return Summary(
        placed=int(placed.sum()),
        unplaced=int((readable & ~placed).sum()),
        buckets=int(np.count_nonzero(placement.images_per_bucket)),
        samples=int(counts.samples.sum()),
        batches=int(counts.batches.sum()),
        short_batches=int(counts.short.sum()),
        mean_crop=float(loss.mean()) if len(loss) else 0.0,
        median_crop=float(np.median(loss)) if len(loss) else 0.0,
        p95_crop=float(np.quantile(loss, 0.95)) if len(loss) else 0.0,
        worst_crop=float(loss.max()) if len(loss) else 0.0,
        enlarged=float(np.mean(enlargement(sizes, placement)[placed] > BARELY)) if len(loss) else 0.0,
        mean_pixels=float(placement.bucket_sizes[placed].astype(np.float64).prod(axis=1).mean()) if len(loss) else 0.0,
    )


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
    numbers = logs.mean(), np.median(logs), logs.std(), aspects.min(), aspects.max()
    return AspectRatioSummary(len(aspects), *map(float, numbers))


def crop_loss_summary(dims: Any, bucket_set: BucketSet) -> CropLossSummary:
    """Of [N, 2] sizes (width, height), each in the bucket that `FixedBuckets(bucket_set)` gives it.

    Raises:
        KohyaBucketError: another shape, a side below 1, or no bucket set.
    """
    aspects, index = _aspects(dims), assign_many_indices(dims, bucket_set)
    if not len(aspects):
        return CropLossSummary(0, *[math.nan] * 4)
    loss = aspect_loss(bucket_set.aspects[index], aspects)
    return CropLossSummary(len(loss), *map(float, (loss.mean(), np.median(loss), np.percentile(loss, 95), loss.max())))


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
