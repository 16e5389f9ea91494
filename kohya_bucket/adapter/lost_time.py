"""What GPUs lose to waiting and repeats, for each way of giving them batches: predicted before a run is begun."""

from __future__ import annotations

from typing import NamedTuple

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.planning.idle import dealt_costs, lost_share, lost_share_of, trained_cost
from kohya_bucket.planning.option_values import COST

__all__ = ["LostTime", "lost_time"]


class LostTime(NamedTuple):
    """Shares of all GPUs' time, by `same_shape`: False, True and "cost"."""

    shuffled: float
    one_shape: float
    equal_cost: float


def lost_time(group: GroupPlanner, gpus: int, seed: int = 0, epoch: int = 1) -> LostTime:
    """What an epoch of a group loses on so many GPUs, each way; by the model's cost, or pixels where none is named."""
    alone, one_shape, equal_cost = (
        group.planner(ranks, same_shape).plan(seed, epoch)
        for ranks, same_shape in ((1, True), (gpus, True), (gpus, COST))
    )
    shuffled = lost_share(dealt_costs(alone, gpus, seed), trained_cost(alone))
    return LostTime(shuffled, lost_share_of(one_shape), lost_share_of(equal_cost))
