"""What happens to buckets with fewer images than a batch: moved to the next best bucket, or dropped."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.sizes import IntArray, size_keys, sizes_of_keys

__all__ = ["UNDERFILLED_POLICIES", "settle_underfilled"]

UNDERFILLED_POLICIES = ("keep", "redistribute", "drop")


def settle_underfilled(
    bucket_sizes: IntArray, reasons: npt.NDArray[np.uint8], batch_size: int, redistribute: bool,
    limit: IntArray | None = None,
) -> None:  # fmt: skip
    """Change decisions in place until every bucket holds at least a batch. The order of images decides nothing.

    The smallest bucket is dissolved first (of equally small ones the narrowest, then the lowest): each of its
    images moves to the remaining bucket next to the image's own size by Manhattan distance (of equally distant
    ones the largest area, then the narrowest). What cannot move, or would stay below a batch in the last bucket,
    loses its bucket (`Reason.UNDERFILLED`).

    Args:
        bucket_sizes: [N, 2] int32; rows whose reason is not `PLACED` are left alone.
        limit: [N, 2] sizes that a bucket must not exceed in either side (for no upscaling).
    """
    placed = np.flatnonzero(reasons == Reason.PLACED)
    if not len(placed):
        return
    origin = bucket_sizes[placed].astype(np.int64)
    keys, bucket_of = np.unique(size_keys(origin), return_inverse=True)
    buckets = sizes_of_keys(keys).astype(np.int64)
    counts = np.bincount(bucket_of, minlength=len(buckets))
    alive = np.ones(len(buckets), dtype=np.bool_)
    areas = buckets.prod(axis=1)
    while True:
        small = np.flatnonzero(alive & (counts < batch_size))
        if not len(small):
            break
        at = small[np.argmin(counts[small])]
        alive[at] = False
        rows = np.flatnonzero(bucket_of == at)
        counts[at] = 0
        targets = np.flatnonzero(alive)
        bucket_of[rows] = -1
        if not redistribute or not len(targets) or not len(rows):
            continue
        # Largest area first, so that the first of the smallest distances is the one wanted.
        targets = targets[np.argsort(-areas[targets], kind="stable")]
        distance = np.abs(origin[rows, None, :] - buckets[None, targets, :]).sum(axis=2)
        if limit is not None:
            fits = (buckets[None, targets, :] <= limit[placed[rows], None, :]).all(axis=2)
            distance = np.where(fits, distance, np.iinfo(np.int64).max)
        best = distance.argmin(axis=1)
        possible = distance[np.arange(len(rows)), best] < np.iinfo(np.int64).max
        bucket_of[rows[possible]] = targets[best[possible]]
        counts += np.bincount(targets[best[possible]], minlength=len(buckets))
    lost = bucket_of < 0
    bucket_sizes[placed] = np.where(lost[:, None], 0, buckets[bucket_of])
    reasons[placed[lost]] = Reason.UNDERFILLED
