"""The sampler behind sd-scripts' training loader: one plan, dealt out to the ranks in turn."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.utils.data import Sampler

from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.adapter.group import GroupPlanner, TrainedPart
from kohya_bucket.adapter.guard import Planned
from kohya_bucket.adapter.ranks import is_first_process, world_size
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.planning import EpochPlan

__all__ = ["PlanSampler", "RanksDifferError", "ResumePoint"]

logger = logging.getLogger("kohya_bucket")


class RanksDifferError(KohyaBucketError):
    """The ranks do not hold the same data set, so no common plan exists."""


@dataclass(frozen=True)
class ResumePoint:
    """Where a resumed run begins: an epoch (counted as the trainer does, from 1), and batches of each process in it.

    Attributes:
        done: batches trained before.
        left: batches to be trained.
    """

    epoch: int
    done: int
    left: int


class PlanSampler(Sampler[PlannedBatch], Planned):
    """Yields an epoch's batches for all ranks: rank r's share is every world-size-th, beginning with r.

    Args:
        planner: the group's images.
        seed: the datasets' seed; rank 0's is used everywhere.
        current_epoch: the counter that the trainer advances before it iterates; None keeps epoch 0's order.
        clock: a counter for what depends on the epoch within a batch (sd-scripts can leave out captions every few
            epochs) where the order stays that of epoch 0.
        current_step: the trainer's counter of steps, for what depends on it within a batch (sd-scripts can begin with
            few words of a caption).
    """

    def __init__(
        self,
        planner: GroupPlanner,
        seed: int,
        current_epoch: Any | None,
        *,
        clock: Any | None = None,
        current_step: Any | None = None,
    ) -> None:
        self.planner = planner
        self.current_epoch = current_epoch
        self._clock = clock
        self._current_step = current_step
        self.world_size = world_size()
        self.planned_ranks = self.world_size if planner.settings.same_shape else 1
        self.seed = _agree(planner, seed) if self.world_size > 1 else seed
        self.on_start: Callable[[int], None] = _ignore
        self.repeat_first = False  # the next iteration begins with each process' first batch twice
        self._shift = 0
        self._made: tuple[tuple[int, int], EpochPlan] | None = None
        self._rest: EpochPlan | None = None
        self._rest_before: tuple[TrainedPart, ...] = ()
        self._before: tuple[TrainedPart, ...] = ()
        self._current = self.plan

    @property
    def epoch(self) -> int:
        """The epoch that is planned: the trainer's count, moved on by what a resumed run had trained before."""
        return 0 if self.current_epoch is None else int(self.current_epoch.value) + self._shift

    @property
    def plan(self) -> EpochPlan:
        """The whole plan of the present epoch."""
        now = (self.seed, self.epoch)
        if self._made is None or self._made[0] != now:
            self._made = (now, self.planner.plan(self.seed, self.epoch, self.planned_ranks))
        return self._made[1]

    def resume(self, history: Sequence[TrainedPart]) -> ResumePoint:
        """Train what is left of the epoch of `history` in the next iteration, and later epochs after it."""
        self.seed, epoch = history[0].seed, history[0].epoch
        rest = self.planner.plan(self.seed, epoch, self.planned_ranks, history)
        same = history[-1].global_batch == tuple(rest.global_batch.tolist())
        self._rest_before = tuple(history[:-1] if same else history)
        if rest.steps == 0:  # the epoch was complete
            rest, self._rest_before = self.planner.plan(self.seed, epoch + 1, self.planned_ranks), ()
        self._rest = rest
        return ResumePoint(rest.epoch, self._first(rest), self._length(rest) // self.world_size)

    def begin_at(self, epoch: int, batches: int) -> ResumePoint:
        """Leave out `batches` batches of each process at the beginning of an epoch that this run plans."""
        global_batch = self.planner.planner(self.planned_ranks).global_batch
        steps = batches * self.world_size // self.planned_ranks
        return self.resume([TrainedPart(self.seed, epoch, tuple(global_batch.tolist()), steps)])

    def progress(self, steps: int) -> tuple[TrainedPart, ...]:
        """What is trained of the present epoch, when each process has trained `steps` (0: all)."""
        plan = self._current
        end = plan.first_step + plan.steps
        done = min(steps * self.world_size // self.planned_ranks, end) if steps else end
        done -= sum(part.steps for part in self._before)
        return (*self._before, TrainedPart(self.seed, self.epoch, tuple(plan.global_batch.tolist()), done))

    def __len__(self) -> int:
        return self._length(self.plan)

    def __iter__(self) -> Iterator[PlannedBatch]:
        if self._rest is not None and self.current_epoch is not None:
            plan, self._before, self._rest = self._rest, self._rest_before, None
            self._shift = plan.epoch - int(self.current_epoch.value)
        else:
            plan, self._before = self.plan, ()
        self._current = plan
        if self.current_epoch is not None:
            self.on_start(self._first(plan))
            if is_first_process():
                logger.info("epoch %d: %s", self.epoch, plan.ledger().text)
        again, self.repeat_first = self.world_size if self.repeat_first else 0, False
        return self._batches(plan, self.epoch, again)

    def _first(self, plan: EpochPlan) -> int:
        """Batches of the epoch that each process has trained before a plan begins."""
        return plan.first_step * self.planned_ranks // self.world_size

    def _length(self, plan: EpochPlan) -> int:
        return -(-plan.steps * self.planned_ranks // self.world_size) * self.world_size

    def _batches(self, plan: EpochPlan, epoch: int, again: int) -> Iterator[PlannedBatch]:
        planner, begin = self.planner, plan.first_step * self.planned_ranks
        told = epoch if self._clock is None else int(self._clock.value)
        for i in chain(range(again), range(self._length(plan))):
            step, rank = divmod(i, self.planned_ranks)
            step %= plan.steps  # without one shape for all, the last ranks may have to begin again
            bucket = int(plan.bucket_of_step[step])
            dataset = planner.dataset_of(bucket)
            bucket -= int(planner.first_bucket[dataset])
            images = np.asarray(plan.indices(step, rank) - planner.first_image[dataset], dtype=np.int32)
            seed = (self.seed * 1_000_003 + epoch) * 1_000_003 + begin + i
            global_step = None if self._current_step is None else int(self._current_step.value)
            yield PlannedBatch.make(begin + i, told, dataset, images, seed, bucket, global_step)


def _ignore(_: int) -> None:
    """Nobody wants to know where an iteration begins."""


def _agree(planner: GroupPlanner, seed: int) -> int:
    """Rank 0's seed, after making sure that all ranks hold the same images."""
    mine = (planner.digest, planner.batch_sizes.tolist(), len(planner.bucket_ids), int(planner.repeats.sum()), seed)
    everyone: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(everyone, mine)
    different = [rank for rank, other in enumerate(everyone) if other[:2] != everyone[0][:2]]
    if different:
        counts = "; ".join(f"rank {rank}: {e[2]} images, {e[3]} samples" for rank, e in enumerate(everyone))
        raise RanksDifferError(
            f"rank {different[0]} holds another data set than rank 0 ({counts}): every process must see the same "
            f"files and settings; with a validation split, set validation_seed"
        )
    return int(everyone[0][4])
