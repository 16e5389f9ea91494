"""The sampler behind a trainer's loader, whose items are whole batches: one plan, dealt out to the ranks in turn.

accelerate deals the items out to the ranks in turn. The sampler yields a global order in which every run of world-size
items is one step of the plan: a batch for each rank.
"""

from __future__ import annotations

import gc
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import Sampler

from kohya_bucket.checks import LOADER_OPTIONS, is_first_process, loader_mistake
from kohya_bucket.datasets.agreement import gather, world
from kohya_bucket.errors import ConfigError
from kohya_bucket.planning import EpochPlan, EpochPlanner, EpochPosition
from kohya_bucket.planning.fingerprint import agree
from kohya_bucket.planning.resume import ResumePoint
from kohya_bucket.texts import counted, one_line
from kohya_bucket.trainers.door.batches import BadImages, PlannedBatch
from kohya_bucket.trainers.door.door import Planned
from kohya_bucket.trainers.door.group import GroupPlanner, left_over, no_batch, splits_of_stages
from kohya_bucket.trainers.door.ranks import end_run

logger = logging.getLogger("kohya_bucket")


class Counter(Protocol):
    """A number that a trainer counts up, such as a `multiprocessing.Value`."""

    value: int


class PlanSampler(Sampler[PlannedBatch], Planned):
    """Yields an epoch's batches for all ranks: rank r's share is every world-size-th, beginning with r.

    Args:
        planner: the group's images.
        seed: the datasets' seed; rank 0's is used everywhere.
        current_epoch: the counter that the trainer advances before it iterates; None for validation, which keeps epoch
            0's order.
        clock: a counter for what depends on the epoch within a batch (captions may be left out every few epochs) where
            the order stays that of epoch 0.
        current_step: the trainer's counter of steps, for what depends on it within a batch (a caption may begin
            with few of its words).
    """

    def __init__(
        self, planner: GroupPlanner, seed: int, current_epoch: Counter | None, *, clock: Counter | None = None,
        current_step: Counter | None = None,
    ) -> None:  # fmt: skip
        self.planner, self.current_epoch = planner, current_epoch
        self._clock, self._current_step = clock, current_step
        self.world_size, self._rank = world()
        self.seed = self._agreed(seed) if self.world_size > 1 else seed
        self.bad_images = BadImages(planner.first_image.tolist())
        self.on_start: Callable[[int], object] = lambda _: None
        self.on_end: Callable[[], object] = lambda: None
        self.exhausted = False  # all batches of the present epoch are dealt out, though not all may be trained
        self._unreadable = 0, 0  # so many before the present epoch, and so many of them replaced
        # The next iteration begins with each process' first batch twice, for a trainer that throws one away.
        self.repeat_first = False
        self._shift = 0
        self._rest: EpochPosition | None = None
        self._start = EpochPosition(self.seed, self.epoch)
        self._current = self.plan
        never = left_over(planner, self.world_size)[1]
        if current_epoch is not None and never and not self._current.steps:
            end_run(no_batch(never))
        if current_epoch is not None and is_first_process():
            for line in (never, splits_of_stages(planner, self.world_size)):
                if line:
                    logger.warning("%s", one_line(line))

    @classmethod
    def told_by(cls, collator: Any, planner: GroupPlanner, seed: int, *, training: bool) -> PlanSampler:
        """One that a collator tells the epoch and the step; without `training`, in the order of epoch 0."""
        counter, clock = (collator.current_epoch, None) if training else (None, collator.current_epoch)
        return cls(planner, seed, counter, clock=clock, current_step=collator.current_step)

    @property
    def epoch(self) -> int:
        """The epoch that is planned: the trainer's count, moved on by what a resumed run had trained before."""
        return 0 if self.current_epoch is None else int(self.current_epoch.value) + self._shift

    @property
    def plan(self) -> EpochPlan:
        """The whole plan of the present epoch."""
        return self._planner.plan_at(EpochPosition(self.seed, self.epoch))

    def resume(self, position: EpochPosition) -> ResumePoint:
        """Train what is left of an epoch in the next iteration, and later epochs after it."""
        self.seed = position.seed
        if self._planner.plan_at(position).steps == 0:  # the epoch was complete
            position = position.next_epoch()
        self._rest, rest = position, self._planner.plan_at(position)
        return ResumePoint(rest.epoch, rest.first_step, rest.steps)

    def begin_at(self, epoch: int, batches: int) -> ResumePoint:
        """Leave out `batches` batches of each process at the beginning of an epoch that this run plans."""
        return self.resume(self._planner.position(EpochPosition(self.seed, epoch), batches))

    def position(self, batches: int) -> EpochPosition:
        """Where the present epoch stands, when each process has trained so many of its batches (0: all)."""
        first, end = self._current.first_step, self._current.first_step + self._current.steps
        step = min(batches, end) if batches else end
        return self._planner.position(self._start, max(step, first))

    def summary(self, batches: int) -> str:
        """One line on what the present epoch trained, when each process has trained so many of its batches (0: all)."""
        plan, (total, replaced) = self._current, self._unreadable
        unreadable, again = self.bad_images.total - total, self.bad_images.replaced - replaced
        if batches:
            bad = f", {counted(unreadable, 'time')} an unreadable one left out" if unreadable else ""
            of = counted(plan.first_step + plan.steps, "batch")
            return f"epoch {plan.epoch} ended after {batches:,} of {of}{bad}"
        return f"epoch {plan.epoch}: {replace(plan.ledger(), unreadable=unreadable, instead=again)}"

    def loss_scale(self, batches: int) -> float:
        """Of the batch with which this process has trained so many of the present epoch (0: all)."""
        plan = self._current
        last = batches - plan.first_step if batches else plan.steps
        return plan.loss_scale(last - 1, self._rank)

    @property
    def largest_batch(self) -> int:
        """No batch of one process has more images, in any epoch: by a budget, it may be more than the trainer's own."""
        planner = self._planner
        held = planner.demand_model.images_per_bucket * int(self.planner.repeats.max(initial=1))
        full = planner.global_batch // self.world_size
        if any(policy.reason is not None and not policy.leaves_out for policy in planner.options.policies):
            return int(full.max(initial=1))  # what is padded or moved may fill a batch of any bucket
        return int(np.minimum(full, held).max(initial=1))

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What a position holds for; see `GroupPlanner.fingerprint`."""
        return self.planner.fingerprint(self.world_size)

    @property
    def _planner(self) -> EpochPlanner:
        return self.planner.planner(self.world_size)

    def _agreed(self, seed: int) -> int:
        """Rank 0's seed, after making sure that all ranks hold the same images."""
        first = {"largest_first": self.planner.options.largest_first}  # it orders a first epoch, and holds for no state
        everyone = agree(
            {**self.fingerprint, **first, "samples": int(self.planner.repeats.sum()), "seed": seed},
            gather,
            "holds another dataset",
            "Every process must see the same files and settings; with a validation split, set validation_seed",
            ignore=("seed",),
            names=self.planner.image_names,
        )
        return int(everyone[0]["seed"])

    def __len__(self) -> int:
        return self.plan.steps * self.world_size

    def __iter__(self) -> Iterator[PlannedBatch]:
        if self.current_epoch is not None:
            self.on_end()
            self._unreadable = self.bad_images.total, self.bad_images.replaced
        if self._rest is not None and self.current_epoch is not None:
            self._start, self._rest = self._rest, None
            self._shift = self._start.epoch - int(self.current_epoch.value)
        else:
            self._start = EpochPosition(self.seed, self.epoch)
        self._current = plan = self._planner.plan_at(self._start)
        self.exhausted = False
        if self.current_epoch is not None:
            self.on_start(plan.first_step)
        repeated, self.repeat_first = self.world_size if self.repeat_first else 0, False
        return self._batches(plan, self.epoch, repeated)

    def _batches(self, plan: EpochPlan, epoch: int, repeated: int) -> Iterator[PlannedBatch]:
        planner, first_item = self.planner, plan.first_step * self.world_size
        epoch_of_captions = epoch if self._clock is None else int(self._clock.value)
        for i in chain(range(repeated), range(plan.steps * self.world_size)):
            self._stop_at_bad_images()
            step, rank = divmod(i, self.world_size)
            bucket = plan.bucket(step, rank)
            dataset = planner.dataset_of(bucket)
            bucket -= int(planner.first_bucket[dataset])
            images = np.asarray(plan.indices(step, rank) - planner.first_image[dataset], dtype=np.int32)
            seed = (self.seed * 1_000_003 + epoch) * 1_000_003 + first_item + i
            global_step = None if self._current_step is None else int(self._current_step.value)
            self.bad_images.count_here()  # loaders without workers read in this process
            scale = plan.loss_scale(step, rank) if self.current_epoch is not None else 1.0
            yield PlannedBatch(first_item + i, epoch_of_captions, dataset, images, seed, bucket, global_step, scale)
        self.exhausted = True
        self._stop_at_bad_images()

    def _stop_at_bad_images(self) -> None:
        """A worker that finds one cannot end the run, and says why; here it ends, a few batches later."""
        if self.planner.options.on_bad_image == "stop" and self.bad_images:
            image = self.planner.name_of(int(np.flatnonzero(self.bad_images.counts)[0]))
            end_run(f"{image} cannot be read: repair or remove it, or leave on_bad_image out of the options")


def arguments_over(
    group: type, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any],
    batch_size: int | None = 1,
) -> dict[str, Any]:  # fmt: skip
    """The arguments by name of a `DataLoader` call that takes one item of a group at a time (`batch_size` says how
    the trainer writes that) and brings no sampler; none of any other call.
    """
    try:
        arguments = dict(signature.bind(None, *args, **kwargs).arguments)
    except TypeError:
        return {}
    arguments.pop("self")
    arguments |= arguments.pop("kwargs", {})
    ordered = arguments.get("sampler") or arguments.get("batch_sampler") or arguments.get("batch_size", 1) != batch_size
    return arguments if isinstance(arguments.get("dataset"), group) and not ordered else {}


def with_plan(
    arguments: dict[str, Any], sampler: PlanSampler, in_worker: Callable[[], None],
    names: Mapping[str, str] = LOADER_OPTIONS,
) -> dict[str, Any]:  # fmt: skip
    """The arguments of a trainer's own call, for a loader that draws from a plan.

    `in_worker` opens the trainer's door in a worker process; `names` are as in `loader_mistake`.

    Raises:
        ConfigError: PyTorch would refuse them.
    """
    if wrong := loader_mistake(arguments, names):
        raise ConfigError(": ".join(wrong))
    planned = {name: value for name, value in arguments.items() if name != "shuffle"} | {"sampler": sampler}
    if planned.get("generator") is None:
        # Every iterator draws a number. From the process's own generator, that would shift a resumed run's noise.
        planned["generator"] = torch.Generator().manual_seed(sampler.seed % 2**63)
    if planned.get("num_workers"):
        trainers_init = planned.get("worker_init_fn")
        planned["worker_init_fn"] = partial(_start_worker, trainers_init, in_worker, sampler.bad_images)
    return planned


def _start_worker(
    then: Callable[[int], Any] | None, prepare: Callable[[], None], bad_images: BadImages, worker: int
) -> None:
    prepare()
    bad_images.count_here()
    # The garbage collector writes into every object it looks at, which copies its page.
    gc.freeze()
    if then is not None:
        then(worker)
