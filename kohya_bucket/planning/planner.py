"""`plan_epoch` and `EpochPlanner`: from bucket numbers to `[step][rank] -> indices`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import pair_keys, pairs_of, runs
from kohya_bucket.checks import integer, whole
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.batch_sizes import as_global_batch, count_buckets, one_or_all, per_rank_batches
from kohya_bucket.planning.demand import Demand, smallest_ids
from kohya_bucket.planning.demand_model import DemandModel, as_bucket_ids
from kohya_bucket.planning.equal_cost import step_count
from kohya_bucket.planning.fingerprint import fingerprint_of
from kohya_bucket.planning.ledger import LedgerReason, Rows, ledger_rows
from kohya_bucket.planning.options import PlanOptions, known_options
from kohya_bucket.planning.plan import EpochPlan, mixed_row
from kohya_bucket.planning.stages import BEGUN_WITH, Draft, begun_with, costliest_first, planned, settled

if TYPE_CHECKING:
    from kohya_bucket.planning.resume import EpochPosition


def plan_epoch(
    bucket_ids: npt.ArrayLike,
    batch_size: npt.ArrayLike | None = None,
    *,
    world_size: int = 1,
    seed: int = 0,
    epoch: int = 0,
    done: Sequence[Done] = (),
    **options: Any,
) -> EpochPlan:
    """Plan one epoch for all ranks.

    Equal arguments give equal plans, on every rank, machine, Python and numpy. Global batches of one bucket are
    planned first and sliced by rank afterwards; those that do not give every rank a batch then meet others of equal
    cost. With step_shapes="one" they do not, and as long as `batch_size * world_size` is kept, the images of each step
    are the same for any number of ranks.

    Args:
        bucket_ids: [N] bucket number of each image, -1 without one; or [N, R] with one column per resolution.
        batch_size: images of one rank in one step: a number, or [K] per bucket.
        world_size: number of ranks.
        seed: any integer.
        epoch: 0 or more.
        done: what of the epoch has been trained already, as (global batch, steps, ranks) in order. The plan then holds
            the rest: the very steps that would have followed, or, with another global batch or number of ranks, the
            images that are left, planned again. A global batch is a number or [K]. With step_shapes="one" the same
            steps follow on any number of ranks with the same global batch; ranks only count with `largest_first`.
        options: see `PlanOptions`.

    Raises:
        PlanError: a value outside of its range, or an option without what it needs.
        TypeError: an option that does not exist, with the nearest one.

    Examples:
        >>> bucket_ids = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1]  # the bucket of each image
        >>> plan = plan_epoch(bucket_ids, 2, world_size=2, seed=42)
        >>> [[plan.indices(step, rank).tolist() for rank in range(2)] for step in range(plan.steps)]
        [[[2], [3]], [[0, 1], [5, 4]], [[7, 8], [6, 9]]]
        >>> print(plan.ledger())
        10 images, 0 missed, 0 repeated
    """
    planner = EpochPlanner(bucket_ids, batch_size, world_size=world_size, **known_options(plan_epoch, options))
    return planner.plan(seed, epoch, done)


_GlobalBatch = npt.NDArray[np.int64]
Done = tuple[npt.ArrayLike, int] | tuple[npt.ArrayLike, int, int | None]
"""A trained part of an epoch: (global batch, steps), or with ranks."""


class EpochPlanner:
    """Arguments and errors as in `plan_epoch`, without `seed`, `epoch` and `done`.

    Args:
        first_epoch: the one that a run trains first. With `plan_at`, which trainers and loaders call, it begins with
            the batch that costs a rank most, unless `largest_first` is set or the order shuffles nothing.

    Attributes:
        options: the options, checked.
        fingerprint: the data and the options as plain values, ready for JSON; equal ones give equal plans for
            an equal seed and epoch.
        demand_model: what epochs are asked to train.
        global_batch: [K] images that fill a step of each bucket, on all ranks together.
        full_batch: [K] images that leave no remainder: what fills a rank's batch; with step_shapes="one", a global one.
        epochs: with `equal_epochs`, those that all others are like, in how much they train of every bucket.
    """

    def __init__(
        self,
        bucket_ids: npt.ArrayLike,
        batch_size: npt.ArrayLike | None = None,
        *,
        world_size: int = 1,
        first_epoch: int = 0,
        **options: Any,
    ) -> None:
        self.options = chosen = PlanOptions(**known_options(EpochPlanner, options))
        self.world_size = whole("world_size", world_size, 1, bits=31)
        ids, highest = as_bucket_ids(bucket_ids)
        self.n_buckets = count_buckets(highest, batch_size, chosen.sizes, chosen.tokens)
        per_rank = per_rank_batches(batch_size, self.n_buckets, chosen.budgets(), chosen.sizes)
        self.global_batch = per_rank * self.world_size
        self.full_batch = per_rank if chosen.by_cost else self.global_batch
        self._context = chosen.context(self.global_batch)
        if chosen.largest_first and chosen.item_costs is None:
            raise PlanError(
                "largest_first is set, but the buckets' sizes are unknown: give bucket_sizes or bucket_tokens"
            )
        self._shards: npt.NDArray[np.int32] | None = None
        if chosen.arrangement.uses_shards and chosen.shards is not None:
            from kohya_bucket.planning.windows import checked_shards

            self._shards = checked_shards(chosen.shards, len(ids))
        self.demand_model = DemandModel(ids, self.n_buckets, chosen)
        epochs = self.demand_model.distinct_epochs() if chosen.equal_epochs else range(1)
        if epochs is None:
            raise PlanError(
                "equal_epochs is set with fractional repeats or regularization, or images have many different numbers "
                "of resolutions: what an epoch trains then never comes round, so no length fits all epochs; use whole "
                "repeats, or leave equal_epochs out"
            )
        self.epochs = epochs
        first_epoch = whole("first_epoch", first_epoch, 0)
        self._tried_first = first_epoch if chosen.largest_first is None and chosen.arrangement.shuffles else None
        self._alone: dict[tuple[int, int, bytes], list[int]] = {}  # what `_steps_alone` has found
        self._last: tuple[EpochPosition, EpochPlan] | None = None  # what `plan_at` was asked for last
        self.fingerprint = fingerprint_of(
            ids,
            self.demand_model.images_per_bucket,
            {**chosen.stored(self._context), "global_batch": one_or_all(self.global_batch)},
        )

    def plan(
        self, seed: int = 0, epoch: int = 0, done: Sequence[Done] = (), begun_with: int | None = None
    ) -> EpochPlan:
        """Plan an epoch, or what is left of it; see `plan_epoch`, and `EpochPosition` for `begun_with`."""
        try:
            return self._plan(integer("seed", seed), epoch, done, begun_with)
        except MemoryError as error:
            raise PlanError(
                f"epoch {epoch} does not fit into memory ({error}): lower repeats and train more epochs"
            ) from None

    def _plan(self, seed: int, epoch: int, done: Sequence[Done], first: int | None) -> EpochPlan:
        asked = self.demand_model.for_epoch(seed, whole("epoch", epoch, 0, bits=31))
        # What is left is planned for the present global batch, with which nothing is trained so far.
        trained = [self._trained_part(part) for part in done] + [(self.global_batch, self.world_size, 0)]
        # The epoch as it was begun; wherever the global batch changed, what was left then is planned again.
        plan = self._planned(asked.demand, asked.demand, trained[0][0], trained[0][1], seed, epoch, 0)
        plan = plan.with_ledger(asked.total, [ledger_rows(asked.unplaced, -1, -1, -1, LedgerReason.NO_BUCKET)])
        plan = plan if first is None else begun_with(plan, first)
        part, moved = 0, plan.ledger_rows
        for global_batch, ranks, steps in trained:
            other_ranks = ranks != plan.world_size
            if (other_ranks and self.options.by_cost) or not np.array_equal(global_batch, plan.global_batch):
                part += 1
                left = untrained(plan, self.n_buckets, moved)
                rest = self._planned(left, asked.demand, global_batch, ranks, seed, epoch, part)
                plan, moved = replace(rest, first_step=plan.first_step), rest.ledger_rows
            elif other_ranks:  # the same steps, of one bucket each, in the order that they have
                plan = replace(plan, world_size=ranks)
            plan = plan.after(steps)
        return plan

    def plan_at(self, position: EpochPosition) -> EpochPlan:
        """The plan from a position on; the last one is kept, so that asking again gives the same object."""
        if self._last is None or self._last[0] != position:
            plan = self.plan(position.seed, position.epoch, position.done, position.begun_with)
            self._last = position, costliest_first(plan) if self._begins_run(position) else plan
        return self._last[1]

    def _begins_run(self, position: EpochPosition) -> bool:
        return not position.done and position.epoch == self._tried_first

    def position(self, start: EpochPosition, step: int) -> EpochPosition:
        """Where a run stands that went on from `start` with these plans and has trained `step` steps of the epoch."""
        ranks = self.world_size if self.options.by_rank else None
        if self._begins_run(start):
            start = replace(start, begun_with=self.plan_at(start).fingerprint.get(BEGUN_WITH))
        return start.at_step(step, one_or_all(self.global_batch), ranks)

    def _trained_part(self, part: Done) -> tuple[_GlobalBatch, int, int]:
        """(global batch, ranks, steps) of a trained part. Ranks only count where the plan depends on them."""
        if len(part) not in (2, 3):
            raise PlanError(f"done holds {part!r}, but must hold (global batch, steps), or those and the ranks")
        size, steps, ranks = (*part, None)[:3]
        world = self.world_size if ranks is None or not self.options.by_rank else whole("ranks", ranks, 1)
        global_batch = as_global_batch(size, self.n_buckets)
        if self.options.by_rank and (global_batch % world).any():
            raise PlanError(f"global batch is {size!r}, but must be a multiple of the {world} ranks that trained it")
        return global_batch, world, whole("done", steps, 0)

    def moved_pairs(self) -> list[tuple[int, int]]:
        """(own bucket, bucket trained in) between which whole epochs move images, whichever the seed.

        Raises:
            PlanError: without `equal_epochs`: then what epochs train may never come round.
        """
        if not self.options.equal_epochs:
            raise PlanError("moves are only known for all epochs with equal_epochs=True")
        moves: set[tuple[int, int]] = set()
        for epoch in self.epochs:
            demand = self.demand_model.for_epoch(0, epoch).demand
            for rows in self._settled(demand, self.full_batch, 0, epoch)[1]:
                moves.update(rows[["bucket", "to_bucket"]].tolist())
        return sorted(pair for pair in moves if pair[0] != pair[1])

    def _settled(self, demand: Demand, full_batch: _GlobalBatch, seed: int, epoch: int) -> tuple[Demand, list[Rows]]:
        return settled(self.options, replace(self._context, seed=seed, epoch=epoch), full_batch, demand, demand)

    def steps_alone(self) -> list[int]:
        """Steps of each of `epochs` by itself; with `equal_epochs` the shorter ones split batches to have the most."""
        return self._steps_alone(self.global_batch, self.world_size, 0)

    def _steps_alone(self, global_batch: _GlobalBatch, ranks: int, seed: int) -> list[int]:
        key = (seed, ranks, global_batch.tobytes())
        group = ranks if self.options.by_cost else 1  # without, a step is a batch of all ranks
        if key not in self._alone:
            steps, trainings = [], []
            for epoch in self.epochs:
                demand = self.demand_model.for_epoch(seed, epoch).demand
                counts = self._settled(demand, global_batch // group, seed, epoch)[0].per_bucket()
                steps.append(step_count(counts, global_batch, group))
                trainings.append(int(counts.sum()))
            if self.options.equal_epochs:
                _check_equal(self.epochs, steps, trainings, ranks if self.options.stages is not None else None)
            self._alone[key] = steps
        return self._alone[key]

    def _planned(
        self, asked: Demand, epoch_asked: Demand, global_batch: _GlobalBatch, ranks: int, seed: int, epoch: int,
        part: int,
    ) -> EpochPlan:  # fmt: skip
        draft = Draft(
            options=self.options,
            context=replace(self._context, seed=seed, epoch=epoch),
            seed=seed,
            epoch=epoch,
            part=part,
            ranks=ranks,
            global_batch=global_batch,
            asked=asked,
            epoch_asked=epoch_asked,
            shards=self._shards,
            least_steps=0 if part or len(self.epochs) == 1 else max(self._steps_alone(global_batch, ranks, seed)),
        )
        return planned(draft, self.fingerprint, moves=self.demand_model.several_buckets)


def _check_equal(epochs: Sequence[int], steps: list[int], trainings: list[int], ranks: int | None) -> None:
    """Refuse an epoch that has too few images to be split into the steps of the longest one.

    Of stages, which give `ranks`, each of `epochs` is the first: there, a step needs an image for every rank.
    """
    longest = max(steps)
    for number, (epoch, alone, count) in enumerate(zip(epochs, steps, trainings, strict=True), start=1):
        if alone < longest > count // (ranks or 1):
            what, where = (f"epoch {epoch}", "epoch") if ranks is None else (f"stage {number}", "stage")
            raise PlanError(
                f"{what} trains too few images in an epoch ({count}) for the {longest} steps of another {where}"
                + ("" if ranks is None else f" (ranks: {ranks})")
                + ": raise the repeats of its images, or the batch size of the others, or leave no remainder out"
            )


def untrained(plan: EpochPlan, n_buckets: int, changes: Rows) -> Demand:
    """What a plan trains, as a demand: each image as often as it is in the plan's steps, in the bucket it was given.

    `changes` are what the remainder policy changed when the epoch was planned.
    """
    bucket = np.repeat(plan.bucket_of_step, plan.length)
    mixed = plan.bucket_of_step < 0
    rows = mixed_row(plan.bucket_of_step[mixed])
    bucket[np.repeat(mixed, plan.length)] = np.repeat(plan.mixed.bucket[rows].ravel(), plan.mixed.length[rows].ravel())
    trainings = pair_keys(bucket, plan.items[runs(plan.length, plan.start)])
    pairs, times = np.unique(_sent_home(trainings, changes), return_counts=True)
    in_bucket, image = pairs_of(pairs)
    return Demand(image, smallest_ids(in_bucket, n_buckets), times.astype(np.int64), n_buckets)


def _sent_home(trainings: npt.NDArray[np.int64], rows: Rows) -> npt.NDArray[np.int64]:
    """[T] `pair_keys` of (bucket, image), where each that the remainder policy moved has its own bucket again."""
    moved = rows[rows["delta"] == 0]
    if len(moved) == 0 or len(trainings) == 0:
        return trainings
    trainings = np.sort(trainings)
    away, home = (pair_keys(moved[name], moved["image"]) for name in ("to_bucket", "bucket"))
    order = np.argsort(away, kind="stable")
    away, home = away[order], home[order]
    # Of equal trainings the first move takes the first, the second the next; moves that are trained already find none.
    place = np.searchsorted(trainings, away) + np.arange(len(away)) - np.searchsorted(away, away)
    found = (place < len(trainings)) & (trainings[np.minimum(place, len(trainings) - 1)] == away)
    trainings[place[found]] = home[found]
    return trainings


def never_full(planner: EpochPlanner) -> npt.NDArray[np.intp]:
    """Numbers of the buckets that hold images, of which no epoch asks as many trainings as fill a global batch."""
    most = _most_asked(planner.demand_model)
    return np.flatnonzero((most > 0) & (most < planner.full_batch))


def never_trained(planner: EpochPlanner) -> npt.NDArray[np.intp]:
    """Numbers of the images that no epoch trains: without a bucket, or left out with it every time."""
    ids = planner.demand_model.ids
    hopeless = np.zeros(planner.n_buckets + 1, dtype=np.bool_)
    hopeless[-1] = True  # id -1: no bucket
    if planner.options.leaves_out_small_buckets:
        hopeless[never_full(planner)] = True
    lost = hopeless[ids]
    return np.flatnonzero(lost if lost.ndim == 1 else lost.all(axis=1))


def _most_asked(model: DemandModel) -> npt.NDArray[np.int64]:
    """[K] trainings of each bucket in the epoch that asks most of it; where epochs never come round, no fewer."""
    epochs = model.distinct_epochs()
    if epochs is not None:
        # As in `moved_pairs`: images change from seed to seed, numbers do not.
        asked = [model.for_epoch(0, epoch).demand.per_bucket() for epoch in epochs]
        most: npt.NDArray[np.int64] = np.stack(asked).max(axis=0)
        return most
    ids, times = model.ids if model.several_buckets else model.ids[:, None], model.most_times()
    placed = ids >= 0
    weights = np.broadcast_to(times[:, None], ids.shape)[placed]
    return np.bincount(ids[placed], weights=weights, minlength=model.n_buckets).astype(np.int64)
