"""`BucketBatchSampler`: the plan as a batch sampler for torch's DataLoader, on one rank or many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.utils.data import Sampler

from kohya_bucket.checks import as_flag, integer, one_of, whole
from kohya_bucket.datasets.accelerate_view import called_by_accelerate_loop, reading_shard, refuse_untold_steps
from kohya_bucket.datasets.agreement import agree_on
from kohya_bucket.datasets.never_trained import warn_of_never_trained
from kohya_bucket.datasets.planned_index import rank_indices
from kohya_bucket.datasets.shards import with_shards
from kohya_bucket.errors import PlanError
from kohya_bucket.planning import ORDERS, REMAINDERS, EpochPlan, EpochPlanner, EpochPosition, Ledger
from kohya_bucket.planning.options import PlanKeywords, known_options

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["BucketBatchSampler"]


class BucketBatchSampler(Sampler[list[int]]):
    """Yields lists of data set indices, all of one bucket; in each step, of the same bucket on every rank (or, with
    same_shape="cost", of buckets of equal cost where it has to be).

    Every epoch is `plan_epoch` of the arguments: each image exactly as often as asked, with exceptions only as
    the remainder policy makes them, all of them in `ledger()`. The sampler counts its epochs itself: an epoch
    that was read to its end is followed by the next one. `set_epoch` chooses another.

    Args:
        bucket_indices: a data set with `bucket_indices` (and `bucket_set`, if it has one), or [N] bucket numbers,
            -1 for images that are not to be trained; [N, R] with `resolutions`.
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
        **options: Unpack[PlanKeywords],
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
        self._planned: tuple[tuple[int, EpochPosition], EpochPlan] | None = None
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
        if not called_by_accelerate_loop() and (number := whole("epoch", epoch, 0)) != self._start.epoch:
            self._start = self._live = EpochPosition(self.seed, number)
            self._live_steps = 0

    def plan(self) -> EpochPlan:
        """The plan that the next iteration trains, or what is left of it."""
        return self._plan_for(self._view()[0])

    def ledger(self) -> Ledger:
        """The ledger of that plan: see `Ledger`."""
        return self.plan().ledger()

    def __len__(self) -> int:
        """Batches that this rank trains in the epoch, those before a loaded position included."""
        replicas, _, shard = self._view()
        return self._steps_of_epoch(replicas) * (1 if shard is None else replicas)

    def __iter__(self) -> Iterator[list[int]]:
        replicas, rank, shard = self._view()
        self._by_accelerate = called_by_accelerate_loop()
        if shard is not None:
            # accelerate then neither waits for full batches nor fills up the last ones with images of the first.
            shard.batch_size, shard.even_batches = None, False
        start = self._start
        if start.done and self._plan_for(replicas).steps == 0:
            # Saved behind the last step, but before the end was noticed: the rest of that epoch is empty.
            self._start = self._live = start.next_epoch()
            return iter(())
        return self._batches(start, replicas, (rank,) if shard is None else range(replicas))

    def _batches(self, start: EpochPosition, replicas: int, ranks: Iterable[int]) -> Iterator[list[int]]:
        self._start = start
        plan = self._plan_for(replicas)
        if replicas > 1:
            agree_on(plan)
        trained_with = (planner := self._planner(replicas)).fingerprint["global_batch"], planner.ranks
        self._live_steps = plan.first_step + plan.steps
        for step, batches in enumerate(zip(*(rank_indices(plan, r) for r in ranks), strict=True)):
            for number, batch in enumerate(batches):
                if number == len(batches) - 1:
                    self._live = start.at_step(plan.first_step + step + 1, *trained_with)
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
        if step is None and self._by_accelerate and not read_to_its_end and position != self._start:
            refuse_untold_steps()
        if step is not None:
            step = whole("step", step, 0)
            steps = self._live_steps or self._steps_of_epoch(replicas)
            if step > steps:
                raise PlanError(
                    f"step is {step}, but epoch {position.epoch} has {steps} steps: count from the start of the epoch, "
                    "not of the run; images would be missed after a resume"
                )
            read_to_its_end = 0 < self._live_steps <= step
            position = position.at_step(step, planner.fingerprint["global_batch"], planner.ranks)
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
        plan = self._plan_for(replicas)
        return plan.first_step + plan.steps

    def _view(self) -> tuple[int, int, Any]:
        """(ranks, this rank, accelerate's wrapper if it is calling: it wants the batches of all ranks in turn)."""
        shard = reading_shard()
        if shard is not None:
            ranks = int(shard.num_processes)
            if self._replicas is not None and self._replicas[0] != ranks:
                raise PlanError(f"num_replicas is {self._replicas[0]}, but accelerate runs {ranks} processes")
            return ranks, int(shard.process_index), shard
        if self._replicas is not None:
            return *self._replicas, None
        if dist.is_available() and dist.is_initialized():
            return dist.get_world_size(), dist.get_rank(), None
        return 1, 0, None

    def _planner(self, replicas: int) -> EpochPlanner:
        if replicas not in self._planners:
            batch_size, options = self._arguments
            self._planners[replicas] = EpochPlanner(self.bucket_indices, batch_size, world_size=replicas, **options)
        return self._planners[replicas]

    def _plan_for(self, replicas: int) -> EpochPlan:
        wanted, start = (replicas, self._start), self._start
        if self._planned is None or self._planned[0] != wanted:
            self._planned = wanted, self._planner(replicas).plan(start.seed, start.epoch, start.done)
        return self._planned[1]


def _replicas(num_replicas: int | None, rank: int | None) -> tuple[int, int] | None:
    if num_replicas is None and rank is None:
        return None
    if num_replicas is None or rank is None:
        raise PlanError("num_replicas and rank belong together: give both, or neither")
    replicas, number = whole("num_replicas", num_replicas, 1), integer("rank", rank)
    if not 0 <= number < replicas:
        raise PlanError(f"rank is {rank}, but with num_replicas={num_replicas} must be 0 to {replicas - 1}")
    return replicas, number
