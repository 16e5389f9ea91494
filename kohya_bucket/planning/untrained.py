"""What a plan still holds, as a demand: for planning the rest of an epoch anew."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.demand import Demand
from kohya_bucket.planning.ledger_rows import LedgerRows
from kohya_bucket.planning.plan import EpochPlan
from kohya_bucket.planning.sequencing import smallest_ids

__all__ = ["untrained"]


def untrained(plan: EpochPlan, n_buckets: int, changes: LedgerRows) -> Demand:
    """What a plan trains, as a demand: each image as often as it is in the plan's steps, in the bucket it was given.

    `changes` are what the remainder policy changed when the epoch was planned.
    """
    bucket = np.repeat(plan.bucket_of_step.astype(np.int64), plan.length)
    mixed = plan.bucket_of_step < 0
    bucket[np.repeat(mixed, plan.length)] = plan.mixed.buckets_of_images(-1 - plan.bucket_of_step[mixed])
    ends = np.cumsum(plan.length, dtype=np.int64)
    at = np.repeat(plan.start - ends + plan.length, plan.length) + np.arange(len(bucket))
    keys, times = np.unique(_sent_home(bucket << 32 | plan.items[at], changes), return_counts=True)
    image, in_bucket = (keys & 0xFFFFFFFF).astype(np.int32), smallest_ids(keys >> 32, n_buckets)
    return Demand(image, in_bucket, times.astype(np.int64), n_buckets)


def _sent_home(keys: npt.NDArray[np.int64], rows: LedgerRows) -> npt.NDArray[np.int64]:
    """(bucket << 32 | image) of trainings, with those that the remainder policy moved back in their own bucket."""
    moved = np.flatnonzero(rows.delta == 0)
    if len(moved) == 0 or len(keys) == 0:
        return keys
    keys = np.sort(keys)
    away = rows.to_bucket[moved].astype(np.int64) << 32 | rows.image[moved]
    order = np.argsort(away, kind="stable")
    first, turn = np.searchsorted(keys, away[order]), np.arange(len(order)) - np.searchsorted(away[order], away[order])
    at = first + turn
    there = (at < len(keys)) & (keys[np.minimum(at, len(keys) - 1)] == away[order])
    home = rows.bucket[moved].astype(np.int64) << 32 | rows.image[moved]
    keys[at[there]] = home[order][there]
    return keys
