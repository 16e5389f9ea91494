"""drop: what does not fill a batch is left out, another part in each epoch. All batches are full."""

from __future__ import annotations

import numpy as np

from kohya_bucket.planning.demand import Change, Demand
from kohya_bucket.planning.ledger import LedgerReason
from kohya_bucket.planning.policy import RemainderContext, RemainderPolicy, change_of
from kohya_bucket.planning.rotation import take_in_rotation

__all__ = ["DROP"]


def _drop(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Change]]:
    """Leave out each bucket's remainder in rotation; of buckets that never fill a batch, `small_buckets` decides."""
    rows = take_in_rotation(demand, demand.per_bucket() % context.global_batch, context.seed, context.epoch)
    if len(rows) == 0:
        return demand, []
    return demand.changed(rows, np.full(len(rows), -1, dtype=np.int64)), [change_of(demand, rows, -1)]


DROP = RemainderPolicy("drop", "leaves a different part out each epoch", _drop, LedgerReason.DROPPED)
