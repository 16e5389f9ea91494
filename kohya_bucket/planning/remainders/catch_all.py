"""catch_all: the remainders of all buckets are trained together, at one base size.

The idea is NovelAI's: what does not fill a batch of its bucket goes into batches of the base resolution.
"""

from __future__ import annotations

import numpy as np

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.demand import Change, Demand
from kohya_bucket.planning.ledger import LedgerReason
from kohya_bucket.planning.policy import RemainderContext, RemainderPolicy, moved_to
from kohya_bucket.planning.rotation import take_in_rotation

__all__ = ["CATCH_ALL"]


def _catch_all(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Change]]:
    """Move every bucket's remainder, in rotation, to the base bucket of its group.

    The base bucket's own last batch may be short; no other is, except of buckets whose images would be enlarged
    and must not be. Nothing is lost.

    Raises:
        PlanError: no base bucket is named, and without `bucket_sizes` none can be chosen.
    """
    if context.base_bucket is None and context.bucket_sizes is None:
        raise PlanError("remainder='catch_all' needs base_bucket, or bucket_sizes to choose the squarest bucket")
    base = np.arange(demand.n_buckets, dtype=np.int32)
    for group in np.unique(context.groups):
        members = np.flatnonzero(context.groups == group)
        if context.base_bucket is not None and context.groups[context.base_bucket] == group:
            base[members] = context.base_bucket
        elif context.bucket_sizes is not None:
            base[members] = members[_squarest(context.bucket_sizes[members])]
    for k in np.flatnonzero(context.no_upscale).tolist():
        base[k] = base[k] if context.fits(k)[base[k]] else k
    counts = demand.per_bucket()
    moved = np.where(base == np.arange(demand.n_buckets), 0, counts % context.global_batch)
    rows = take_in_rotation(demand, moved, context.seed, context.epoch)
    return moved_to(demand, rows, base[demand.bucket[rows]])


def _squarest(sizes: IntArray) -> int:
    """Number of the size nearest to a square; of several, the one with the largest area, then the first."""
    wide = np.maximum(sizes[:, 0], sizes[:, 1]) / np.maximum(np.minimum(sizes[:, 0], sizes[:, 1]), 1)
    area = sizes[:, 0].astype(np.int64) * sizes[:, 1]
    return int(np.lexsort((-area, wide))[0])


CATCH_ALL = RemainderPolicy(
    "catch_all",
    "trains them together at the squarest bucket's size",
    _catch_all,
    LedgerReason.CAUGHT,
    moves_images=True,
    enlarges=True,
)
