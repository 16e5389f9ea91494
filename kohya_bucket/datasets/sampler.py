"""`BucketBatchSampler`: the plan as a batch sampler for torch's DataLoader, on one rank or many."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import ConcatDataset, Sampler, Subset

from kohya_bucket.buckets.arrays import runs
from kohya_bucket.checks import array_of, as_flag, integer, one_of, opened_by_numpy, whole
from kohya_bucket.datasets.agreement import agree_on, given_rank, world
from kohya_bucket.datasets.planned_index import rank_indices
from kohya_bucket.datasets.readers import dataset_being_read, let_count_on, refuse_another_deal
from kohya_bucket.errors import PlanError
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
from kohya_bucket.planning.fingerprint import NAMES, digest_of_names
from kohya_bucket.planning.options import known_options


def warn_of_never_trained(planner: EpochPlanner) -> None:
    """Warn, at the line that called the caller, of images whose buckets never fill a global batch."""
    if not planner.options.leaves_out_small_buckets or not len(small := never_full(planner)):
        return
    lost = np.setdiff1d(never_trained(planner), planner.demand_model.unplaced)
    warnings.warn(
        f"{len(lost):,} images are never trained: their buckets ({len(small)} of {planner.n_buckets}) fill no batch on "
        f"{planner.world_size} ranks; small_buckets='keep' trains them in short batches, never_trained names them",
        stacklevel=3,
    )


def with_shards(options: dict[str, Any], dataset: Any) -> dict[str, Any]:
    """The options with the dataset's own shards, where the order goes by shards and none are given."""
    order = ORDERS.get(options.get("order", ""))
    if order is None or not order.uses_shards or options.get("shards") is not None:
        return options
    for holder in (dataset, getattr(dataset, "source", None)):
        if (shards := getattr(holder, "shards", None)) is not None:
            if keep_shards := getattr(getattr(holder, "store", None), "keep_shards", None):
                keep_shards(options.get("open_shards", PlanOptions.open_shards))
            return {**options, "shards": shards}
    return options


def buckets_of(dataset: Any) -> npt.NDArray[Any]:
    """The bucket of each item: a dataset's `bucket_indices`, or the numbers themselves.

    Raises:
        PlanError: something that does not know them, before any of its items is read.
    """
    if hasattr(dataset, "bucket_indices"):
        return np.asarray(dataset.bucket_indices)
    inside = opened_by_numpy(dataset)
    if inside is None and (isinstance(dataset, (list, tuple, range)) or hasattr(dataset, "__array__")):
        return array_of("bucket_indices", dataset)
    what = type(dataset).__name__ if inside is None else f"a {type(dataset).__name__} of {inside.__name__}"
    what += " has no bucket_indices, which say what may be in one batch"
    if isinstance(dataset, Sampler):
        raise PlanError(
            f"{what}: keep Lightning from replacing the batch sampler, which knows its ranks, by "
            "use_distributed_sampler=False"
        )
    raise PlanError(f"{what}: {_WHOLE_DATASETS}")


_WHOLE_DATASETS = (
    "to train a part of a dataset, give the dataset itself and repeats=, 0 for each image that is left out; to join "
    "several, make one dataset of all their files (docs/tutorial-loop.md, Split and join)"
)


def _refuse_new_numbers(dataset: Any) -> None:
    """Raises `PlanError` for torch's wrappers that make new numbers of a `PlannedIndex`, and so drop its bucket."""
    if isinstance(dataset, (Subset, ConcatDataset)):
        raise PlanError(
            f"the loader reads a {type(dataset).__name__}, which does not hand on in which bucket an image is to be "
            f"trained, and this plan trains some in another than their own: {_WHOLE_DATASETS}"
        )
    held = getattr(dataset, "datasets", ())  # of a StackDataset, which hands everything on
    for inner in held.values() if isinstance(held, Mapping) else held:
        _refuse_new_numbers(inner)


def _settle_drop_last(drop_last: bool, options: dict[str, Any]) -> None:
    """Set the remainder policy that it stands for: with True also for buckets that fill no batch at all."""
    remainder = one_of("remainder", options.setdefault("remainder", "drop" if drop_last else "keep"), REMAINDERS)
    if drop_last != REMAINDERS[remainder].leaves_out:
        raise PlanError(f"drop_last={drop_last} and remainder={remainder!r} contradict: leave one of them out")
    if drop_last:
        options.setdefault("small_buckets", remainder)


class BucketBatchSampler(Sampler[list[int]]):
    """Yields lists of dataset indices, all of one bucket.

    In each step, all ranks train the same bucket, or buckets of nearly equal cost where one has too few images for all.

    Every epoch is `plan_epoch` of the arguments: each image exactly as often as asked, with exceptions only as
    the remainder policy makes them, all of them in `ledger()`. The sampler counts its epochs itself: an epoch
    that was read to its end is followed by the next one. `set_epoch` chooses another.

    Args:
        bucket_indices: a dataset with `bucket_indices` (and `bucket_set` and `image_names`, if it has them), or [N]
            bucket numbers, -1 for images that are not to be trained; [N, R] with `resolution_mode`. Where it has no
            names, ranks and saved states cannot tell whether a number stands for another image than it should.
        batch_size: images of one rank in one step; a number or [K] per bucket; None with `max_pixels`.
        shuffle: False gives the same order in every epoch: bucket after bucket, images by number.
        drop_last: True leaves out what does not fill a batch on all ranks (another part in each epoch), so that all
            batches are full: with a warning where a bucket fills none, and is never trained; `small_buckets` has
            other ways. False trains it in short batches. None leaves it to `remainder`.
        num_replicas: ranks; by default those of torch.distributed, or 1. Without torch.distributed, ranks cannot
            compare what they train: give them the same images in the same order.
        rank: this rank; by default that of torch.distributed, or 0.
        seed: of all epochs, the same on all ranks.
        options: remainder, order, repeats, max_pixels, ...; see `PlanOptions`.

    Attributes:
        bucket_indices: the bucket numbers, as given.

    Raises:
        PlanError: arguments that no epoch can be planned with.
        TypeError: an option that does not exist, with the nearest one.

    With accelerate, prepare its loader with `prepare_loader`.

    Examples:
        >>> dataset = BucketedDataset.from_folder("photos", KohyaBuckets.for_arch("sd"))
        >>> sampler = BucketBatchSampler(dataset, batch_size=2, seed=42)
        >>> list(sampler)
        [[5, 4], [0, 1], [2, 3]]
        >>> sampler.epoch, sampler.state_dict()["seed"]
        (1, 42)
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
        self.bucket_indices = buckets_of(bucket_indices)
        self._dataset = bucket_indices if hasattr(bucket_indices, "left_out") else None
        self._named = bucket_indices if hasattr(bucket_indices, "image_names") else None
        bucket_set = getattr(bucket_indices, "bucket_set", None)
        if bucket_set is not None:
            options.setdefault("bucket_sizes", bucket_set.sizes)
        shuffle = as_flag("shuffle", shuffle, PlanError)
        if drop_last is not None:
            _settle_drop_last(as_flag("drop_last", drop_last, PlanError), options)
        if not shuffle and ORDERS[order := one_of("order", options.setdefault("order", "file"), ORDERS)].shuffles:
            raise PlanError(f"shuffle=False and order={order!r} contradict: leave one of them out")
        self._replicas = given_rank(num_replicas, rank)
        self._arguments = (batch_size, options)
        self._planners: dict[int, EpochPlanner] = {}
        # Where the next iteration starts, and how far the last one was read.
        self._start = self._read_to = EpochPosition(integer("seed", seed), 0)
        self._steps_before = self._epoch_steps = 0  # of its epoch: steps before it, and in all; 0: none was begun
        self._fresh = True  # no epoch was named, loaded or begun
        self.accelerated = False  # by prepare_loader, whose loader counts:
        self.handed_out: int | None = None  # batches of this iteration
        planner = self._planner(1 if self._replicas is None else self._replicas[0])
        self.batch_size = int(planner.global_batch.max(initial=1)) // planner.world_size
        self.drop_last = planner.options.policy.leaves_out
        warn_of_never_trained(planner)
        self.shuffle = planner.options.arrangement.shuffles

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

    def deal_to(self, replicas: int, rank: int) -> None:
        """Take the ranks from a caller that counts them otherwise than torch.distributed does.

        Raises:
            PlanError: the sampler was made for other ranks.
        """
        if (told := self._replicas or (replicas, rank)) != (replicas, rank):
            raise PlanError(
                f"num_replicas is {told[0]} and rank is {told[1]}, but accelerate runs {replicas} processes, and this "
                f"is process {rank}: leave both out"
            )
        self._replicas = told

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration; a loaded position in that epoch is kept.

        Raises:
            PlanError: no whole number, or a negative one.
        """
        self._fresh = False
        if (number := whole("epoch", epoch, 0)) != self._start.epoch:
            self._move_to(EpochPosition(self.seed, number))

    def plan(self) -> EpochPlan:
        """The plan that the next iteration trains, or what is left of it."""
        return self._planner(self._ranks[0]).plan_at(self._start)

    def ledger(self) -> Ledger:
        """The ledger of that plan: see `Ledger`. Images that this process could not read so far count as unreadable."""
        plan, unreadable = self.plan(), 0
        if self._dataset is not None:
            bad = self._dataset.left_out[plan.items[runs(plan.length, plan.start)]]
            unreadable = int(np.count_nonzero(bad))
        return replace(plan.ledger(), unreadable=unreadable, instead=unreadable)

    def __len__(self) -> int:
        """Batches that this rank trains in the epoch, those before a loaded position included."""
        plan = self.plan()
        return plan.first_step + plan.steps

    def __iter__(self) -> Iterator[list[int]]:
        refuse_another_deal(self, fresh=self._fresh)
        return self._own_batches()

    def _own_batches(self) -> Iterator[list[int]]:
        """What iterating yields, for a loader that deals out nothing, whatever is around it."""
        self.handed_out = None
        return self._batches(self._start)

    def _batches(self, start: EpochPosition) -> Iterator[list[int]]:
        self._fresh = False
        replicas, rank = self._ranks
        planner = self._planner(replicas)
        plan = planner.plan_at(start)
        if plan.moves:
            _refuse_new_numbers(dataset_being_read())
        if replicas > 1:
            agree_on(plan, self._digest_of_names, self._image_names)
        self._start = self._read_to = start
        self._steps_before, self._epoch_steps = plan.first_step, plan.first_step + plan.steps
        if not plan.steps:
            self._start = start.next_epoch()
        for step, batch in enumerate(rank_indices(plan, rank), plan.first_step + 1):
            self._read_to = planner.position(start, step)
            if step == self._epoch_steps:  # not after it: many a loop asks for no batch beyond the last
                self._start = start.next_epoch()
            yield batch

    def state_dict(self, step: int | None = None) -> dict[str, Any]:
        """The position as plain values: seed, epoch, steps done, and what data and settings they hold for.

        Args:
            step: steps of the epoch that are trained. By default those that a loader of `prepare_loader` has handed
                out, or else those that were read from this sampler, which is more where a loader reads ahead, as any
                with workers; torchdata's StatefulDataLoader counts itself.

        Raises:
            PlanError: the epoch has fewer steps, as when steps were counted over all epochs; or a loader of
                accelerate's `skip_first_batches`, which reads ahead, is in the middle of an epoch.
        """
        if step is None and self.accelerated and self._epoch_steps:
            if self.handed_out is None:
                raise PlanError(
                    "a loader that is not of prepare_loader reads this sampler, and has read more steps than are "
                    "trained: save state_dict(step=…) with the steps of this epoch that are trained, or go on with "
                    "load_state_dict in place of accelerate's skip_first_batches"
                )
            step = self._steps_before + self.handed_out
        return self._state(step)

    def state_as_read(self) -> dict[str, Any]:
        """The position after what was read from this sampler, for loaders that keep account of what they read."""
        return self._state(None)

    def _state(self, step: int | None) -> dict[str, Any]:
        planner = self._planner(self._ranks[0])
        position = self._read_to
        read_to_its_end = self._start.epoch == position.epoch + 1
        if step is not None:
            step = whole("step", step, 0)
            steps = self._epoch_steps or len(self)
            if step > steps:
                raise PlanError(
                    f"step is {step}, but epoch {position.epoch} has {steps} steps: count from the start of the epoch, "
                    "not of the run; images would be missed after a resume"
                )
            read_to_its_end = step == steps > 0
            position = planner.position(position, step)
        if read_to_its_end:
            position = position.next_epoch()
        return position.state_dict(self._fingerprint(planner))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position, on any number of ranks. Takes the same time for every position.

        With another global batch, what is left of the epoch is planned again: exactly the images not trained yet.

        Raises:
            ResumeError: the data or the settings differ from those that the position was saved for.
            PlanError: it holds more steps than the epoch has.
        """
        planner = self._planner(self._ranks[0])
        position = EpochPosition.from_state_dict(state, self._fingerprint(planner))
        ended = position.done and not planner.plan_at(position).steps
        self._move_to(position.next_epoch() if ended else position)
        let_count_on(self)

    def _move_to(self, position: EpochPosition) -> None:
        self._start = self._read_to = position
        self._epoch_steps, self._fresh = 0, False

    @property
    def _ranks(self) -> tuple[int, int]:
        """(ranks, this rank)."""
        return self._replicas or world()

    def _image_names(self) -> Sequence[str]:
        return () if self._named is None else self._named.image_names

    @cached_property
    def _digest_of_names(self) -> str | None:
        return None if self._named is None else digest_of_names(self._image_names())

    def _fingerprint(self, planner: EpochPlanner) -> dict[str, Any]:
        return {**planner.fingerprint, NAMES: self._digest_of_names}

    def _planner(self, replicas: int) -> EpochPlanner:
        if replicas not in self._planners:
            batch_size, options = self._arguments
            self._planners[replicas] = EpochPlanner(self.bucket_indices, batch_size, world_size=replicas, **options)
        return self._planners[replicas]
