"""pad: a bucket's last batch is filled with images of the same bucket. All batches are full."""

from __future__ import annotations

import numpy as np

from kohya_bucket.planning.demand import Change, Demand
from kohya_bucket.planning.ledger import LedgerReason
from kohya_bucket.planning.policy import RemainderContext, RemainderPolicy, change_of
from kohya_bucket.planning.rotation import take_in_rotation

__all__ = ["PAD"]


def _pad(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Change]]:
    """Ask each bucket for as many more trainings as fill its last batch, of other images in each epoch.

    The added trainings are spread over the bucket's batches like any repeat, not heaped into the last one.
    """
    missing = -demand.per_bucket() % context.global_batch
    rows = take_in_rotation(demand, missing, context.seed, context.epoch)
    if len(rows) == 0:
        return demand, []
    return demand.changed(rows, np.ones(len(rows), dtype=np.int64)), [change_of(demand, rows, +1)]


PAD = RemainderPolicy("pad", "fills it with repeats from the bucket", _pad, LedgerReason.PADDED)
