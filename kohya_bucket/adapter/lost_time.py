"""What GPUs lose to waiting and repeats, for each way of giving them batches: predicted before a run is begun."""

from __future__ import annotations

from typing import NamedTuple

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.planning import ORDERS, EpochPlan
from kohya_bucket.planning.idle import dealt_costs, lost_share, lost_share_of, trained_cost
from kohya_bucket.planning.options import COST

__all__ = ["LostTime", "advice", "lost_time"]

_MUCH = 0.1
_MOST_SAMPLES = 100_000  # of more, one shape per step loses little


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


def advice(group: GroupPlanner, gpus: int, plan: EpochPlan) -> str:
    """What to set where an epoch, of this plan with one shape per step, loses much more than it has to; else ""."""
    options = group.options
    if gpus == 1 or options.same_shape is not True or ORDERS[options.order].uses_shards:
        return ""
    if plan.samples > _MOST_SAMPLES or (lost := lost_share_of(plan)) < _MUCH:
        return ""
    could = lost_share_of(group.planner(gpus, COST).plan(plan.seed, plan.epoch))
    if could > lost / 2:
        return ""
    return (
        f"{lost:.0%} of the time of {gpus} GPUs is predicted to go into waiting and repeats, because all train one "
        f'shape in each step; with same_shape = "cost" in [kohya_bucket] it is {could:.0%}'
    )
