"""The few numbers by which two placements of the same images are compared."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import Placement
from kohya_bucket.buckets.misfits import BARELY, enlargement
from kohya_bucket.buckets.sizes import IntArray

__all__ = ["Summary", "summarize"]


@dataclass(frozen=True)
class Summary:
    """A placement of N images in numbers.

    Attributes:
        placed, unplaced: readable images with and without a bucket.
        buckets: buckets in use.
        samples: images times repeats, of the placed.
        batches, short_batches: of one epoch on one process; a bucket's last batch is short if it is not full.
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


def summarize(sizes: IntArray, placement: Placement, repeats: npt.NDArray[np.int64], batch_size: int) -> Summary:
    """Numbers of one placement; `sizes` [N, 2], `repeats` [N]."""
    placed = placement.placed
    readable = sizes.min(axis=1, initial=1) > 0
    loss = placement.crop_loss[placed]
    samples = samples_per_bucket(placement, repeats)
    return Summary(
        placed=int(placed.sum()),
        unplaced=int((readable & ~placed).sum()),
        buckets=int(np.count_nonzero(placement.images_per_bucket)),
        samples=int(samples.sum()),
        batches=int(np.sum(-(-samples // batch_size))),
        short_batches=int(np.count_nonzero(samples % batch_size)),
        mean_crop=float(loss.mean()) if len(loss) else 0.0,
        median_crop=float(np.median(loss)) if len(loss) else 0.0,
        p95_crop=float(np.quantile(loss, 0.95)) if len(loss) else 0.0,
        worst_crop=float(loss.max()) if len(loss) else 0.0,
        enlarged=float(np.mean(enlargement(sizes, placement)[placed] > BARELY)) if len(loss) else 0.0,
        mean_pixels=float(placement.bucket_sizes[placed].astype(np.float64).prod(axis=1).mean()) if len(loss) else 0.0,
    )


def samples_per_bucket(placement: Placement, repeats: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[K] images times repeats in each bucket of the placement's set."""
    k = 0 if placement.bucket_set is None else len(placement.bucket_set)
    placed = placement.placed
    weights = repeats[placed].astype(np.float64)
    return np.rint(np.bincount(placement.bucket_index[placed], weights=weights, minlength=k)).astype(np.int64)
