"""An epoch of a group on a number of GPUs, as `plan` shows it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.left_over import left_over
from kohya_bucket.adapter.lost_time import LostTime, lost_time
from kohya_bucket.planning.idle import idle_share_independent, idle_share_of

__all__ = ["GpuRow", "gpu_row"]


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


def gpu_row(planner: GroupPlanner, gpus: int, accumulate: int = 1, costs: npt.ArrayLike | None = None) -> GpuRow:
    """Plan an epoch.

    Args:
        accumulate: batches whose gradients make one update.
        costs: [K, 2] two factors of what an item of each bucket costs; by default its width and height.
    """
    options = planner.options
    ranks = gpus if options.same_shape else 1
    plan = planner.plan(0, 1, ranks)
    asked = planner.planner(ranks).demand_model.for_epoch(0, 1).demand
    ledger, over = plan.ledger(), left_over(planner, ranks)
    steps = plan.steps if options.same_shape else -(-plan.steps // gpus)
    independent = idle_share_independent(
        asked.bucket.astype(np.int32),
        planner.batch_sizes,
        planner.bucket_sizes if costs is None else costs,
        world_size=gpus,
        repeats=asked.all_times(),
    )
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
        lost=lost_time(planner, gpus) if costs is None or options.model is not None else None,
    )
