"""A placement in few numbers; `Summary` is what two placements of the same images are compared by."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kohya_bucket.buckets import Placement
from kohya_bucket.buckets.misfits import BARELY, enlargement
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.planning.plan import BucketCounts


@dataclass(frozen=True)
class Summary:
    """A placement of N images in numbers.

    Attributes:
        placed, unplaced: readable images with and without a bucket.
        buckets: buckets in use.
        samples, batches, short_batches: of one epoch on one process; a batch that is not full is short.
        mean_crop, p95_crop, worst_crop: share of an image's area that is cropped off; 0 where nothing is placed.
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
        p95_crop=float(np.quantile(loss, 0.95)) if len(loss) else 0.0,
        worst_crop=float(loss.max()) if len(loss) else 0.0,
        enlarged=float(np.mean(enlargement(sizes, placement)[placed] > BARELY)) if len(loss) else 0.0,
        mean_pixels=float(placement.bucket_sizes[placed].astype(np.float64).prod(axis=1).mean()) if len(loss) else 0.0,
    )
