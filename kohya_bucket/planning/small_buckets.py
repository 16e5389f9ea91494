"""Buckets that never fill a global batch, where the remainder is left out: they would be left out whole, for ever."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.demand import Change, Demand
from kohya_bucket.planning.ledger import LedgerReason
from kohya_bucket.planning.policy import RemainderContext, RemainderPolicy

__all__ = ["apply_policies"]

Changes = list[tuple[Change, LedgerReason]]


def apply_policies(
    policies: tuple[RemainderPolicy, ...], demand: Demand, whole: Demand, context: RemainderContext
) -> tuple[Demand, Changes]:
    """Settle the remainder of every bucket.

    Args:
        policies: one for all buckets; or two, the second for buckets of which the whole epoch asks less than a global
            batch, so that the first would leave them out in every epoch.
        demand: what is to be trained: the epoch, or what is left of it.
        whole: what the whole epoch asks.
        context: see `RemainderContext`.
    """
    stages = [(policies[0], context)]
    if len(policies) > 1:
        small, full = whole.per_bucket() < context.global_batch, np.int64(1)
        # With one image to a batch, a bucket has no remainder: each policy sees only what is its own.
        stages = [
            (policies[1], _with_batch(context, np.where(small, context.global_batch, full))),
            (policies[0], _with_batch(context, np.where(small, full, context.global_batch))),
        ]
    found: Changes = []
    for policy, seen in stages:
        demand, changes = policy.apply(demand, seen)
        found += [(change, policy.reason) for change in changes if policy.reason is not None]
    return demand, found


def _with_batch(context: RemainderContext, global_batch: npt.NDArray[np.int64]) -> RemainderContext:
    return replace(context, global_batch=global_batch)
