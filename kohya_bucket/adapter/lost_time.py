"""What an epoch loses on several GPUs: waiting, repeats, and images that fill no global batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.planning import ORDERS, EpochPlan
from kohya_bucket.planning.idle import (
    dealt_costs,
    idle_share,
    idle_share_of,
    lost_share,
    lost_share_of,
    trained_cost,
)
from kohya_bucket.planning.options import COST
from kohya_bucket.planning.planner import EpochPlanner, never_full, never_trained
from kohya_bucket.texts import counted, some

__all__ = ["GpuRow", "LeftOver", "LostTime", "advice", "gpu_rows", "left_over", "lost_time", "plans_of"]

_MUCH = 0.1
_MOST_SAMPLES = 100_000  # of more, one shape per step loses little


class LostTime(NamedTuple):
    """Shares of all GPUs' time, by `same_shape`: False, True and "cost"."""

    shuffled: float
    one_shape: float
    equal_cost: float


Plans = Callable[[int, bool | str], EpochPlan]
"""The plan of an epoch for a number of processes, with a value of `same_shape`."""


def plans_of(group: GroupPlanner, seed: int = 0) -> Plans:
    """Those of a group, each made once."""
    return cache(lambda ranks, same_shape: group.planner(ranks, same_shape).plan(seed, 1))


def lost_time(plans: Plans, gpus: int, seed: int = 0) -> LostTime:
    """What an epoch loses on so many GPUs, each way; by the model's cost, or pixels where none is named."""
    alone = plans(1, True)
    shuffled = lost_share(dealt_costs(alone, gpus, seed), trained_cost(alone))
    return LostTime(shuffled, lost_share_of(plans(gpus, True)), lost_share_of(plans(gpus, COST)))


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


_SHOWN = 5


@dataclass(frozen=True)
class LeftOver:
    """Where the remainder is left out: what becomes of buckets that it would leave out whole.

    Attributes:
        never_trained: file names of the images that no epoch trains.
        line: for logs and tables; empty where every bucket fills a batch, or nothing is left out.
    """

    never_trained: tuple[str, ...]
    line: str


def left_over(group: GroupPlanner, world_size: int) -> LeftOver:
    """What a group's plans leave over on so many processes."""
    planner = group.planner(world_size)
    if not planner.options.policy.leaves_out:
        return LeftOver((), "")
    small = never_full(planner)
    if not len(small):
        return LeftOver((), "")
    buckets = np.unique(group.bucket_sizes[small], axis=0).tolist()
    where = some([f"{width}x{height}" for width, height in buckets], _SHOWN)
    policy, remainder = planner.options.policies[-1], group.options.remainder
    if policy.leaves_out:
        names = tuple(group.name_of(image) for image in never_trained(planner).tolist())
        count = counted(len(names), "image", "is", "are")
        return LeftOver(
            names,
            f"{count} never trained ({some(names, _SHOWN)}): what {where} hold fills no batch of "
            f"{counted(world_size, 'process')}, and small_buckets = '{policy.name}'; small_buckets = 'keep' "
            "trains them",
        )
    images = np.isin(planner.demand_model.ids, small)
    held = int(np.count_nonzero(images if images.ndim == 1 else images.any(axis=1)))
    return LeftOver(
        (),
        f"{counted(held, 'image')} in buckets that fill no batch of {world_size} process"
        f"{'es' * (world_size > 1)} ({where}), which remainder = '{remainder}' would never train: "
        f"small_buckets = '{policy.name}' {policy.text}",
    )


@dataclass(frozen=True)
class GpuRow:
    """An epoch on a number of GPUs.

    Attributes:
        steps: batches that each GPU trains; updates: changes of the weights, fewer with accumulation.
        samples: trainings by all GPUs together.
        missed, repeated, moved: trainings other than asked, or in another bucket; `ledger` says it in words.
        idle: predicted share of the GPUs' time spent waiting for the one with the most to do.
        left_over: what becomes of buckets that never fill a batch, in words; `never_trained` names the images that no
            epoch trains.
        idle_independent: the same if every GPU drew batches of its own, as trainers do alone.
        lost: predicted share of the GPUs' time that goes into waiting and repeats, each way of giving them batches;
            None for clips without `model`, whose frames have no known cost.
    """

    gpus: int
    steps: int
    updates: int
    samples: int
    missed: int
    repeated: int
    moved: int
    idle: float
    idle_independent: float
    ledger: str
    left_over: str
    never_trained: tuple[str, ...]
    lost: LostTime | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**asdict(self), "lost": self.lost and self.lost._asdict()}


def gpu_rows(
    planner: GroupPlanner, gpus: Sequence[int], accumulate: int = 1, costs: npt.ArrayLike | None = None
) -> tuple[GpuRow, ...]:
    """Plan an epoch on each number of GPUs.

    Args:
        accumulate: batches whose gradients make one update.
        costs: [K, 2] two factors of what an item of each bucket costs; by default its width and height.
    """
    plans, asked = plans_of(planner), planner.planner(1).demand_model.for_epoch(0, 1).demand
    independent = EpochPlanner(
        asked.bucket.astype(np.int32), planner.batch_sizes, repeats=asked.all_times(),
        bucket_sizes=planner.bucket_sizes if costs is None else costs,
    ).plan(0)  # fmt: skip
    return tuple(_gpu_row(planner, n, accumulate, costs, plans, idle_share(dealt_costs(independent, n))) for n in gpus)


def _gpu_row(
    planner: GroupPlanner, gpus: int, accumulate: int, costs: npt.ArrayLike | None, plans: Plans, independent: float
) -> GpuRow:
    options = planner.options
    ranks = gpus if options.same_shape else 1
    plan = plans(ranks, options.same_shape or True)
    ledger, over = plan.ledger(), left_over(planner, ranks)
    steps = plan.steps if options.same_shape else -(-plan.steps // gpus)
    return GpuRow(
        gpus=gpus,
        steps=steps,
        updates=-(-steps // accumulate),
        samples=plan.samples,
        missed=ledger.missed,
        repeated=ledger.repeated,
        moved=ledger.moved,
        idle=idle_share_of(plan, costs) if options.same_shape else independent,
        idle_independent=independent,
        ledger=ledger.text,
        left_over=over.line,
        never_trained=over.never_trained,
        lost=lost_time(plans, gpus) if costs is None or options.model is not None else None,
    )
