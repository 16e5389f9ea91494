"""`BucketBatchSampler`: the plan as a batch sampler for torch's DataLoader, on one rank or many.

`accelerator.prepare` wraps a batch sampler so that rank r of W takes every W-th batch, and drops a group of W
batches whose last one is not full. It tells the sampler nothing of this, neither by a call nor by an argument.
So the sampler looks up the call stack, once per epoch, for accelerate's wrapper, and hands it what it expects:
the batches of all ranks, in turn.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

from kohya_bucket.checks import as_flag, integer, one_of, whole
from kohya_bucket.datasets.agreement import agree_on, world
from kohya_bucket.datasets.planned_index import rank_indices
from kohya_bucket.errors import PlanError
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.planning import (
    ORDERS,
    REMAINDERS,
    EpochPlan,
    EpochPlanner,
    EpochPosition,
    Ledger,
    PlanOptions,
    never_full,
    never_trained,
)
from kohya_bucket.planning.options import known_options

_MODULE = "accelerate.data_loader"


def reading_shard() -> Any | None:
    """accelerate's `BatchSamplerShard` that is calling now, or None.

    Raises:
        PlanError: accelerate is to split each batch, or to read all batches in one process: both would tear
            apart what was planned for a rank.
    """
    module = sys.modules.get(_MODULE)
    if module is None:
        return None
    for frame in _frames():
        caller: Any = frame.f_locals.get("self") if _module_of(frame) == _MODULE else None
        if isinstance(caller, module.BatchSamplerShard):
            if caller.split_batches and caller.num_processes > 1:
                raise PlanError(
                    "accelerate is set to split_batches=True, but every rank's batch is planned already: use "
                    "split_batches=False and give the batch size of one rank"
                )
            return caller
        if type(caller).__name__ == "DataLoaderDispatcher" and caller.state.num_processes > 1:
            raise PlanError(
                "accelerate is set to dispatch_batches=True, which reads all batches in one process: use "
                "dispatch_batches=False, so that every rank reads its own"
            )
    return None


def _called_by_accelerate_loop() -> bool:
    """Whether accelerate's loader is calling on its own account, at the start of an iteration."""
    return any(frame.f_code.co_name == "__iter__" and _module_of(frame) == _MODULE for frame in _frames())


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _frames() -> Iterator[FrameType]:
    """The calls that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def warn_of_never_trained(planner: EpochPlanner) -> None:
    """Warn, in the name of whoever called the caller, of images whose buckets never fill a global batch."""
    if not planner.options.leaves_out_small_buckets or not len(small := never_full(planner)):
        return
    lost = np.setdiff1d(never_trained(planner), planner.demand_model.unplaced)
    warnings.warn(
        f"{len(lost):,} images are never trained: their buckets ({len(small)} of {planner.n_buckets}) fill no batch on "
        f"{planner.world_size} ranks; small_buckets='keep' trains them in short batches, never_trained names them",
        stacklevel=3,
    )


def with_shards(options: dict[str, Any], dataset: Any) -> dict[str, Any]:
    """The options with the data set's own shards, where the order goes by shards and none are given."""
    order = ORDERS.get(options.get("order", ""))
    if order is None or not order.uses_shards or options.get("shards") is not None:
        return options
    for holder in (dataset, getattr(dataset, "source", None)):
        if (shards := getattr(holder, "shards", None)) is not None:
            if isinstance(store := getattr(holder, "store", None), LatentStore):
                store.keep_shards(options.get("open_shards", PlanOptions.open_shards))
            return {**options, "shards": shards}
    return options


class BucketBatchSampler(Sampler[list[int]]):
    """Yields lists of data set indices, all of one bucket.

    In each step, all ranks train the same bucket, or buckets of nearly equal cost where one has too few images for all.

    Every epoch is `plan_epoch` of the arguments: each image exactly as often as asked, with exceptions only as
    the remainder policy makes them, all of them in `ledger()`. The sampler counts its epochs itself: an epoch
    that was read to its end is followed by the next one. `set_epoch` chooses another.

    Args:
        bucket_indices: a data set with `bucket_indices` (and `bucket_set`, if it has one), or [N] bucket numbers,
            -1 for images that are not to be trained; [N, R] with `resolution_mode`.
        batch_size: images of one rank in one step; a number or [K] per bucket; None with `max_pixels`.
        shuffle: False gives the same order in every epoch: bucket after bucket, images by number.
        drop_last: True leaves out what does not fill a batch on all ranks (another part in each epoch), so that all
            batches are full: with a warning where a bucket fills none, and is never trained; `small_buckets` has
            other ways. False trains it in short batches. None leaves it to `remainder`.
        num_replicas: ranks; by default those of torch.distributed, or 1.
        rank: this rank; by default that of torch.distributed, or 0.
        seed: of all epochs, the same on all ranks.
        options: remainder, order, repeats, max_pixels, ...; see `PlanOptions`.

    Attributes:
        bucket_indices: the bucket numbers, as given.

    Raises:
        PlanError: arguments that no epoch can be planned with.
        TypeError: an option that does not exist, with the nearest one.

    With accelerate, prepare the loader as usual; the wrapper is recognized and given the batches of all ranks.
    """

    def __init__(
        self,
        bucket_indices: Any,
        batch_size: npt.ArrayLike | None = None,
        shuffle: bool = True,
        drop_last: bool | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        options = with_shards(known_options(BucketBatchSampler, options), bucket_indices)
        self.bucket_indices = np.asarray(getattr(bucket_indices, "bucket_indices", bucket_indices))
        bucket_set = getattr(bucket_indices, "bucket_set", None)
        if bucket_set is not None:
            options.setdefault("bucket_sizes", bucket_set.sizes)
        shuffle = as_flag("shuffle", shuffle, PlanError)
        if drop_last is not None:
            drop_last = as_flag("drop_last", drop_last, PlanError)
            remainder = one_of(
                "remainder", options.setdefault("remainder", "drop" if drop_last else "keep"), REMAINDERS
            )
            if drop_last != REMAINDERS[remainder].leaves_out:
                raise PlanError(f"drop_last={drop_last} and remainder={remainder!r} contradict: leave one of them out")
            if drop_last:
                options.setdefault("small_buckets", remainder)
        if not shuffle and ORDERS[order := one_of("order", options.setdefault("order", "file"), ORDERS)].shuffles:
            raise PlanError(f"shuffle=False and order={order!r} contradict: leave one of them out")
        self._replicas = _replicas(num_replicas, rank)
        self._arguments = (batch_size, options)
        self._planners: dict[int, EpochPlanner] = {}
        self._start = self._live = EpochPosition(integer("seed", seed), 0)
        self._live_steps = 0
        self._by_accelerate = False
        planner = self._planner(1 if self._replicas is None else self._replicas[0])
        self.batch_size = int(planner.global_batch.max(initial=1)) // planner.world_size
        self.drop_last = planner.options.policy.leaves_out
        warn_of_never_trained(planner)
        self.shuffle = planner.options.arrangement.shuffles
        # accelerate looks for `set_epoch` on the sampler of a batch sampler only.
        self.sampler = self

    def __repr__(self) -> str:
        asked = f"n={len(self.bucket_indices)} batch_size={self.batch_size} shuffle={self.shuffle}"
        ranks = "" if self._replicas is None else f" num_replicas={self._replicas[0]} rank={self._replicas[1]}"
        return f"<{type(self).__name__} {asked} drop_last={self.drop_last}{ranks} seed={self.seed} epoch={self.epoch}>"

    @property
    def epoch(self) -> int:
        """Epoch that the next iteration trains, or goes on with."""
        return self._start.epoch

    @property
    def seed(self) -> int:
        return self._start.seed

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a loaded position in that epoch is kept.

        Calls that accelerate's loader makes on its own account are not followed: after a resume it counts from 0.

        Raises:
            PlanError: no whole number, or a negative one.
        """
        if not _called_by_accelerate_loop() and (number := whole("epoch", epoch, 0)) != self._start.epoch:
            self._start = self._live = EpochPosition(self.seed, number)
            self._live_steps = 0

    def plan(self) -> EpochPlan:
        """The plan that the next iteration trains, or what is left of it."""
        return self._planner(self._view()[0]).plan_at(self._start)

    def ledger(self) -> Ledger:
        """The ledger of that plan: see `Ledger`."""
        return self.plan().ledger()

    def __len__(self) -> int:
        """Batches that this rank trains in the epoch, those before a loaded position included."""
        replicas, _, shard = self._view()
        return self._steps_of_epoch(replicas) * (1 if shard is None else replicas)

    def __iter__(self) -> Iterator[list[int]]:
        replicas, rank, shard = self._view()
        self._by_accelerate = _called_by_accelerate_loop()
        if shard is not None:
            # accelerate then neither waits for full batches nor fills up the last ones with images of the first.
            shard.batch_size, shard.even_batches = None, False
        start = self._start
        if start.done and self._planner(replicas).plan_at(start).steps == 0:
            # Saved behind the last step, but before the end was noticed: the rest of that epoch is empty.
            self._start = self._live = start.next_epoch()
            return iter(())
        return self._batches(start, replicas, (rank,) if shard is None else range(replicas))

    def _batches(self, start: EpochPosition, replicas: int, ranks: Iterable[int]) -> Iterator[list[int]]:
        self._start = start
        planner = self._planner(replicas)
        plan = planner.plan_at(start)
        if replicas > 1:
            agree_on(plan)
        self._live_steps = plan.first_step + plan.steps
        for step, batches in enumerate(zip(*(rank_indices(plan, r) for r in ranks), strict=True)):
            for number, batch in enumerate(batches):
                if number == len(batches) - 1:
                    self._live = planner.position(start, plan.first_step + step + 1)
                yield batch
        self._start = start.next_epoch()

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """The position as plain values: seed, epoch, steps done, and what data and settings they hold for.

        Args:
            step: steps of the epoch that are trained. By default those that were read from this sampler, which
                is more where a loader reads ahead, as any with workers; torchdata's StatefulDataLoader counts itself.

        Raises:
            PlanError: the epoch has fewer steps, as when steps were counted over all epochs; or accelerate's loader,
                which reads ahead, is in the middle of an epoch, and there is no `step`.
        """
        replicas = self._view()[0]
        planner = self._planner(replicas)
        position = self._live
        read_to_its_end = self._start.epoch == position.epoch + 1
        ahead = self._by_accelerate and not read_to_its_end and position != self._start
        # torchdata keeps account of what it read
        if step is None and ahead and not any(_module_of(frame).startswith("torchdata.") for frame in _frames()):
            raise PlanError(
                "accelerate's loader has read more steps than are trained, so this position would miss images after a "
                "resume: save state_dict(step=…) with the steps of this epoch that are trained, which "
                "register_for_checkpointing does not do, or set use_stateful_dataloader=True and let accelerate save "
                "the loader"
            )
        if step is not None:
            step = whole("step", step, 0)
            steps = self._live_steps or self._steps_of_epoch(replicas)
            if step > steps:
                raise PlanError(
                    f"step is {step}, but epoch {position.epoch} has {steps} steps: count from the start of the epoch, "
                    "not of the run; images would be missed after a resume"
                )
            read_to_its_end = 0 < self._live_steps <= step
            position = planner.position(position, step)
        if read_to_its_end:
            position = position.next_epoch()
        return position.state_dict(planner.fingerprint)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, on any number of ranks. Takes the same time for every position.

        With another global batch, what is left of the epoch is planned anew: exactly the images not trained yet.

        Raises:
            ResumeError: the data or the settings are others than those the position was saved for.
        """
        self._start = self._live = EpochPosition.from_state_dict(state, self._planner(self._view()[0]).fingerprint)
        self._live_steps = 0

    def _steps_of_epoch(self, replicas: int) -> int:
        plan = self._planner(replicas).plan_at(self._start)
        return plan.first_step + plan.steps

    def _view(self) -> tuple[int, int, Any]:
        """(ranks, this rank, accelerate's wrapper if it is calling: it wants the batches of all ranks in turn)."""
        shard = reading_shard()
        if shard is not None:
            ranks = int(shard.num_processes)
            if self._replicas is not None and self._replicas[0] != ranks:
                raise PlanError(f"num_replicas is {self._replicas[0]}, but accelerate runs {ranks} processes")
            return ranks, int(shard.process_index), shard
        return *(self._replicas or world()), None

    def _planner(self, replicas: int) -> EpochPlanner:
        if replicas not in self._planners:
            batch_size, options = self._arguments
            self._planners[replicas] = EpochPlanner(self.bucket_indices, batch_size, world_size=replicas, **options)
        return self._planners[replicas]


def _replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int] | None:
    if num_replicas is None and rank is None:
        return None
    if num_replicas is None or rank is None:
        raise PlanError("num_replicas and rank belong together: give both, or neither")
    replicas, number = whole("num_replicas", num_replicas, 1), integer("rank", rank)
    if not 0 <= number < replicas:
        raise PlanError(f"rank is {rank}, but with num_replicas={num_replicas} must be 0 to {replicas - 1}")
    return replicas, number
