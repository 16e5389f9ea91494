"""`EpochPlan`: one epoch as `[step][rank] -> indices`, in a few flat arrays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import runs
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.checks import digest
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.ledger import NO_ROWS, Ledger, LedgerReason, Rows, ledger_rows

_CHUNK = 4096


def _none() -> npt.NDArray[np.int32]:
    return np.zeros((0, 1), dtype=np.int32)


def mixed_row(of_step: Any) -> Any:
    """The row in `MixedSteps` of what `bucket_of_step` holds for a mixed step, and the other way round: -1 is row 0."""
    return -1 - of_step


@dataclass(frozen=True, eq=False)
class MixedSteps:
    """M steps of W ranks each; the images of a step stand rank after rank.

    Attributes:
        length: [M, W] int32 images of each rank's batch; 0 where there are fewer images than ranks, and a rank trains
            one of the step again.
        bucket: [M, W] int32 bucket of each rank.
    """

    length: npt.NDArray[np.int32] = field(default_factory=_none)
    bucket: npt.NDArray[np.int32] = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.length)

    @cached_property
    def offset(self) -> npt.NDArray[np.int64]:
        """[M, W] where in the step each rank's images begin."""
        begin = np.cumsum(self.length, axis=1, dtype=np.int64) - self.length
        trained = np.count_nonzero(self.length, axis=1, keepdims=True)
        return np.where(self.length > 0, begin, np.arange(self.length.shape[1]) % np.maximum(trained, 1))

    @property
    def images(self) -> npt.NDArray[np.int32]:
        """[M, W] images that each rank trains, an image that is trained again included."""
        return np.maximum(self.length, 1)

    @property
    def unequal(self) -> npt.NDArray[np.bool_]:
        """[M] whether images of different ranks would weigh differently."""
        trained, world = np.count_nonzero(self.length, axis=1), self.length.shape[1]
        equal = (self.images == self.images[:, :1]).all(axis=1)
        unequal: npt.NDArray[np.bool_] = ~equal | (world % np.maximum(trained, 1) > 0)
        return unequal


class BucketCounts(NamedTuple):
    """What an epoch trains of each of K buckets, all ranks together.

    Attributes:
        samples: [K] trainings, repeats that fill ranks included.
        batches: [K] batches of one rank; short: those of them that are not full.
        smallest: [K] images of the smallest batch; 0 where there is none.
        full: [K] images of a full batch.
    """

    samples: npt.NDArray[np.int64]
    batches: npt.NDArray[np.int64]
    short: npt.NDArray[np.int64]
    smallest: npt.NDArray[np.int64]
    full: npt.NDArray[np.int64]

    def within(self, wider: npt.NDArray[np.intp], count: int) -> BucketCounts:
        """What is trained within each of `count` wider buckets; `wider` is the one that each of the K belongs to."""
        samples, batches, short = (np.bincount(wider, column, count).astype(np.int64) for column in self[:3])
        smallest, full = np.full(count, np.iinfo(np.int64).max), np.zeros(count, dtype=np.int64)
        np.minimum.at(smallest, wider, np.where(self.batches > 0, self.smallest, smallest[wider]))
        np.maximum.at(full, wider, self.full)
        return BucketCounts(samples, batches, short, np.where(batches > 0, smallest, 0), full)


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """What every rank trains in every step of one epoch. Made by `plan_epoch`.

    Step s trains the global batch `items[start[s] : start[s] + length[s]]`, all of one bucket. Rank r of W gets
    a slice: `length // W` images, the first `length % W` ranks one more. With fewer images than ranks, rank r
    gets image `r % length` of the batch, so that every rank always has one; those repeats are in the ledger.
    With step_shapes="equal_cost", some steps are mixed: each rank's slice is of a bucket of its own.

    Attributes:
        world_size: W, number of ranks.
        global_batch: [K] images that fill a step of each bucket, all ranks together.
        accumulate: steps whose gradients are added up for one update.
        seed, epoch: as given to `plan_epoch`.
        images: N, images in the dataset.
        asked: trainings asked of the epoch.
        items: [T] int32 image numbers.
        start: [S] int64, length: [S] int32, bucket_of_step: [S] int32; `mixed_row` of a mixed step.
        moves: some images are trained in another bucket than the one they were given (`merge`, `catch_all`),
            or are given several: the bucket has to be taken from the step.
        first_step: step of the epoch that step 0 of this plan is: 0, or the steps done before a resume.
        fingerprint: what the plan was made from, as plain values: equal fingerprints give equal plans.
        bucket_sizes: [K, 2] int32 (width, height), or None if they were not given.
        item_costs: [K] what an image of each bucket costs, or None where neither tokens nor sizes are known.
        mixed: what ranks train in mixed steps.

    Examples:
        >>> plan = plan_epoch([0, 0, 0, 1, 1, 1, 1], 2)
        >>> plan.steps, plan.samples
        (4, 7)
        >>> plan.bucket(0, rank=0), plan.indices(0, rank=0).tolist()
        (0, [1, 0])
        >>> list(plan.rank_batches(rank=0))
        [[1, 0], [4, 3], [6, 5], [2]]
    """

    world_size: int
    global_batch: npt.NDArray[np.int64]
    accumulate: int
    seed: int
    epoch: int
    images: int
    asked: int
    items: npt.NDArray[np.int32] = field(repr=False)
    start: npt.NDArray[np.int64] = field(repr=False)
    length: npt.NDArray[np.int32] = field(repr=False)
    bucket_of_step: npt.NDArray[np.int32] = field(repr=False)
    moves: bool
    fingerprint: dict[str, Any] = field(repr=False)
    bucket_sizes: IntArray | None = field(default=None, repr=False)
    item_costs: npt.NDArray[np.float64] | None = field(default=None, repr=False)
    mixed: MixedSteps = field(default_factory=MixedSteps, repr=False)
    first_step: int = 0
    ledger_rows: Rows = field(default_factory=lambda: NO_ROWS, repr=False)

    @property
    def steps(self) -> int:
        """S, steps of the epoch: the same for every rank."""
        return len(self.start)

    @property
    def updates(self) -> int:
        """Updates of the weights: every `accumulate` steps, and once more for what is left at the end."""
        return -(-self.steps // self.accumulate)

    @property
    def samples(self) -> int:
        """Trainings of the epoch by all ranks together, repeats that fill ranks included."""
        return int(np.maximum(self.length, self.world_size, dtype=np.int64).sum())

    def step_indices(self, step: int) -> npt.NDArray[np.int32]:
        """Image numbers of all ranks in a step, rank after rank.

        Raises:
            PlanError: the epoch has no such step.
        """
        begin, n = self._slice(step)
        batch = self.items[begin : begin + n]
        return batch if n >= self.world_size else batch[np.arange(self.world_size) % n]

    def indices(self, step: int, rank: int) -> npt.NDArray[np.int32]:
        """Image numbers of one rank in a step; at least one, and repeats as often as they are trained.

        Raises:
            PlanError: the epoch has no such step, or the plan no such rank.
        """
        self._check_rank(rank)
        begin, n = self._slice(step)
        offset, images = self._share(step, rank, n)
        return self.items[begin + offset : begin + offset + images]

    def bucket(self, step: int, rank: int) -> int:
        """The bucket that a rank trains in a step."""
        k = int(self.bucket_of_step[step])
        return k if k >= 0 else int(self.mixed.bucket[mixed_row(k), rank])

    def rank_buckets(self, rank: int) -> npt.NDArray[np.int32]:
        """[S] the bucket that a rank trains in each step."""
        self._check_rank(rank)
        buckets: npt.NDArray[np.int32] = self.bucket_of_step.copy()
        at = np.flatnonzero(buckets < 0)
        buckets[at] = self.mixed.bucket[mixed_row(buckets[at]), rank % self.mixed.bucket.shape[1]]
        return buckets

    def rank_lengths(self, rank: int) -> npt.NDArray[np.int64]:
        """[S] images that a rank trains in each step."""
        self._check_rank(rank)
        return self._shares(rank, slice(None))[1]

    def per_bucket(self) -> BucketCounts:
        """Trainings and batches of each bucket."""
        k, ranks = len(self.global_batch), range(self.world_size)
        full = self.global_batch // self.world_size
        bucket = np.concatenate([self.rank_buckets(rank) for rank in ranks])
        images = np.concatenate([self.rank_lengths(rank) for rank in ranks])
        samples = np.bincount(bucket, weights=images, minlength=k).astype(np.int64)
        batches, short = np.bincount(bucket, minlength=k), np.bincount(bucket[images < full[bucket]], minlength=k)
        smallest = np.where(batches > 0, np.iinfo(np.int64).max, 0)
        np.minimum.at(smallest, bucket, images)
        return BucketCounts(samples, batches, short, smallest, full)

    def loss_scale(self, step: int, rank: int) -> float:
        """What a rank multiplies the mean loss of its batch by, so that the ranks' average is that of one rank alone.

        Data-parallel training averages the gradients of ranks, each of its own mean: where the ranks of a step hold 2
        and 1 images, the single one would count double. With n images on this rank and N in the global batch of W
        ranks, the scale is `W * n / N`; a batch that fills ranks by repeats counts each image once. It is 1 in every
        full step.

        Raises:
            PlanError: the epoch has no such step, or the plan no such rank.
        """
        self._check_rank(rank)
        _, n = self._slice(step)
        world = self.world_size
        if n < world:
            return world / (n * len(range(rank % n, world, n)))
        return world * self._share(step, rank, n)[1] / n

    @property
    def unequal_steps(self) -> int:
        """Steps in which `loss_scale` is not 1 on every rank."""
        one = self.bucket_of_step >= 0
        mixed = self.mixed.unequal[mixed_row(self.bucket_of_step[~one])]
        n = self.length[one]
        # Where a few images fill all ranks, each as often as the others, they weigh the same.
        unequal = np.where(n < self.world_size, self.world_size % np.maximum(n, 1), n % self.world_size)
        return int(np.count_nonzero(unequal)) + int(np.count_nonzero(mixed))

    def rank_batches(self, rank: int, first_step: int = 0) -> Iterator[list[int]]:
        """The rank's batches as lists of ints, from `first_step` on; nothing before it is looked at."""
        self._check_rank(rank)
        for chunk in range(first_step, self.steps, _CHUNK):
            at, share = self._shares(rank, slice(chunk, chunk + _CHUNK))
            ends = np.cumsum(share)
            flat = self.items[runs(share, at)].tolist()
            begin = 0
            for end in ends.tolist():
                yield flat[begin:end]
                begin = end

    def after(self, steps: int) -> EpochPlan:
        """The plan of what is left after `steps` of this plan's steps.

        Its ledger is about what is left; what the epoch as a whole misses stands in the ledger of its whole plan.

        Raises:
            PlanError: the plan has fewer steps.
        """
        if steps == 0:
            return self
        if not 0 <= steps <= self.steps:
            raise PlanError(f"{steps} steps are done, but the epoch has only {self.steps}")
        return replace(
            self,
            start=self.start[steps:],
            length=self.length[steps:],
            bucket_of_step=self.bucket_of_step[steps:],
            asked=int(self.length[steps:].sum()),
            first_step=self.first_step + steps,
            ledger_rows=NO_ROWS,
        )

    def with_ledger(self, asked: int, changes: list[Rows]) -> EpochPlan:
        """The same plan with more to report: `asked` trainings, and these changes to them."""
        return replace(self, asked=asked, ledger_rows=np.concatenate([self.ledger_rows, *changes]))

    def ledger(self) -> Ledger:
        """Every image that the epoch trains other than asked, with the reason."""
        rows = np.concatenate([self.ledger_rows, self._rank_fillers()])
        rows = rows[np.lexsort((rows["image"], rows["reason"]))]
        columns: dict[str, Any] = {name: np.ascontiguousarray(rows[name]) for name in rows.dtype.names or ()}
        return Ledger(self.images, self.asked, bucket_sizes=self.bucket_sizes, **columns)

    @cached_property
    def hash(self) -> str:
        """Digest of every step of every rank: ranks that have the same one train the same plan."""
        more = self.length, self.bucket_of_step, self.mixed.length, self.mixed.bucket
        arrays = ((self.items, "<i4"), (self.start, "<i8"), *((array, "<i4") for array in more))
        parts = (np.ascontiguousarray(array, dtype=kind).data for array, kind in arrays)
        return digest(f"{self.world_size} {self.accumulate} {self.steps}", *parts, size=16)

    def _rank_fillers(self) -> Rows:
        """What steps with fewer images than ranks train again: the first rank left over the first image, and so on."""
        short = np.flatnonzero(self.length < self.world_size)
        held = self.length[short].astype(np.int64)
        extra = self.world_size - held
        spare = runs(extra) % np.repeat(held, extra)
        bucket = np.repeat(self.bucket_of_step[short], extra)
        several = np.flatnonzero(bucket < 0)  # there, each rank has one image or none
        bucket[several] = self.mixed.bucket[mixed_row(bucket[several]), spare[several]]
        items = self.items[np.repeat(self.start[short], extra) + spare]
        return ledger_rows(items, bucket, bucket, 1, LedgerReason.RANK_FILLED)

    def _slice(self, step: int) -> tuple[int, int]:
        if not 0 <= step < self.steps:
            raise PlanError(f"step {step} does not exist: the epoch has steps 0 to {self.steps - 1}")
        return int(self.start[step]), int(self.length[step])

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} does not exist: the plan is for ranks 0 to {self.world_size - 1}")

    def _share(self, step: int, rank: int, n: int) -> tuple[int, int]:
        """(where in a step of n images a rank's begin, how many it trains)."""
        row = mixed_row(int(self.bucket_of_step[step]))
        if row >= 0:
            return int(self.mixed.offset[row, rank]), int(self.mixed.images[row, rank])
        share, more = divmod(n, self.world_size)
        return (rank * share + min(rank, more), share + (rank < more)) if share else (rank % n, 1)

    def _shares(self, rank: int, steps: slice) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """([S] where in `items` a rank's images of each step begin, [S] how many it trains)."""
        n = self.length[steps].astype(np.int64)
        share, more = n // self.world_size, n % self.world_size
        offset = np.where(share > 0, rank * share + np.minimum(rank, more), rank % np.maximum(n, 1))
        images = np.maximum(share + (rank < more), 1)
        if len(self.mixed):
            at = np.flatnonzero(self.bucket_of_step[steps] < 0)
            rows = mixed_row(self.bucket_of_step[steps][at])
            offset[at], images[at] = self.mixed.offset[rows, rank], self.mixed.images[rows, rank]
        return self.start[steps] + offset, images


def item_costs(plan: EpochPlan) -> npt.NDArray[np.float64]:
    """[K] what an image of each bucket costs.

    Raises:
        PlanError: the plan knows neither tokens nor sizes.
    """
    if plan.item_costs is None:
        raise PlanError("the plan was made without bucket_sizes and bucket_tokens: costs depend on them")
    return plan.item_costs


def rank_costs(plan: EpochPlan) -> npt.NDArray[np.float64]:
    """[S, W] what each rank of a plan spends in each step, by the costs that it was made with.

    Raises:
        PlanError: the plan knows neither tokens nor sizes.
    """
    each = item_costs(plan)
    columns = [plan.rank_lengths(r) * each[plan.rank_buckets(r)] for r in range(plan.world_size)]
    return np.stack(columns, axis=1)
