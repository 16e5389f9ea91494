"""What is trained once more so that every rank has an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kohya_bucket.planning.demand import Change

if TYPE_CHECKING:
    from kohya_bucket.planning.plan import EpochPlan

__all__ = ["rank_fillers"]


def rank_fillers(plan: EpochPlan) -> Change:
    """What steps with fewer images than ranks train again: the first rank left over the first image, and so on."""
    short = np.flatnonzero(plan.length < plan.world_size)
    length = plan.length[short].astype(np.int64)
    extra = plan.world_size - length
    spare = np.arange(int(extra.sum())) - np.repeat(np.cumsum(extra) - extra, extra)
    spare %= np.repeat(length, extra)
    bucket = np.repeat(plan.bucket_of_step[short], extra)
    mixed = np.flatnonzero(bucket < 0)  # there, each rank has one image or none
    bucket[mixed] = plan.mixed.bucket[-1 - bucket[mixed], spare[mixed]]
    return Change(plan.items[np.repeat(plan.start[short], extra) + spare], bucket, bucket, 1)
