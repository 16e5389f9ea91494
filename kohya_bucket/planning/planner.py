"""`EpochPlanner`: a data set and its settings, checked once, from which the plan of any epoch follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import as_sizes
from kohya_bucket.checks import as_flag, integer, whole
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.batch_layout import cut_batches, split_batches
from kohya_bucket.planning.batch_sizes import as_global_batch, count_buckets, one_or_all, per_rank_batches
from kohya_bucket.planning.demand import Change, Demand
from kohya_bucket.planning.demand_model import DemandModel, as_bucket_ids
from kohya_bucket.planning.fingerprint import fingerprint_of
from kohya_bucket.planning.ledger import LedgerReason
from kohya_bucket.planning.orders import ORDERS
from kohya_bucket.planning.plan import EpochPlan
from kohya_bucket.planning.remainders import REMAINDERS, RemainderContext
from kohya_bucket.planning.separate_repeats import separate_repeats
from kohya_bucket.planning.sequencing import sequence_items
from kohya_bucket.planning.stream import Purpose, stream
from kohya_bucket.planning.untrained import untrained

__all__ = ["EpochPlanner"]

_REASONS = {
    "pad": LedgerReason.PADDED,
    "drop": LedgerReason.DROPPED,
    "merge": LedgerReason.MERGED,
    "catch_all": LedgerReason.CAUGHT,
}
_GlobalBatch = npt.NDArray[np.int64]


class EpochPlanner:
    """Arguments and errors as in `plan_epoch`, without `seed`, `epoch` and `done`.

    Attributes:
        fingerprint: the data and the settings as plain values, ready for JSON; equal ones give equal plans for
            an equal seed and epoch.
    """

    def __init__(
        self,
        bucket_ids: npt.ArrayLike,
        batch_size: npt.ArrayLike | None = None,
        *,
        world_size: int = 1,
        remainder: str = "keep",
        order: str = "shuffled",
        repeats: npt.ArrayLike | Fraction | Sequence[Fraction] | None = None,
        accumulate: int = 1,
        max_pixels: int | None = None,
        bucket_sizes: npt.ArrayLike | None = None,
        regularization: npt.ArrayLike | None = None,
        regularization_uses: int | None = None,
        resolutions: str | None = None,
        resolution_weights: npt.ArrayLike | None = None,
        run_length: int = 8,
        crop_limit: float = 0.25,
        base_bucket: int | None = None,
        bucket_groups: npt.ArrayLike | None = None,
        enlarge: npt.ArrayLike = True,
        equal_epochs: bool = False,
    ) -> None:
        self.world_size = whole("world_size", world_size, 1, bits=31)
        self.accumulate = whole("accumulate", accumulate, 1, bits=31)
        self.run_length = whole("run_length", run_length, 1, bits=31)
        self.remainder = _one_of("remainder", remainder, REMAINDERS)
        self.order = _one_of("order", order, ORDERS)
        self.sizes = None if bucket_sizes is None else as_sizes(bucket_sizes)
        ids, highest = as_bucket_ids(bucket_ids)
        self.n_buckets = count_buckets(highest, batch_size, self.sizes)
        max_pixels = None if max_pixels is None else whole("max_pixels", max_pixels, 1)
        per_rank = per_rank_batches(batch_size, self.n_buckets, max_pixels=max_pixels, bucket_sizes=self.sizes)
        self.global_batch = per_rank * self.world_size
        self.groups = _groups(bucket_groups, self.n_buckets)
        self.crop_limit = _share("crop_limit", crop_limit)
        self.base_bucket = _base(base_bucket, self.n_buckets)
        self.enlarge = _enlarge(enlarge, self.n_buckets, self.sizes)
        if regularization_uses is not None:
            regularization_uses = whole("regularization_uses", regularization_uses, 0)
        self.asking = DemandModel(
            ids, self.n_buckets, repeats, regularization, regularization_uses, resolutions, resolution_weights
        )
        self.equal_epochs = as_flag("equal_epochs", equal_epochs, PlanError)
        self.period = self.asking.period() if self.equal_epochs else 1
        if self.period is None:
            raise PlanError(
                "equal_epochs is set with fractional repeats or regularization: what an epoch trains then never comes "
                "round, so no length fits all epochs; use whole repeats, or leave equal_epochs out"
            )
        self._longest: dict[tuple[int, bytes], int] = {}
        self.fingerprint = fingerprint_of(
            ids,
            self.asking.images_per_bucket,
            remainder=remainder,
            order=order,
            repeats=repeats,
            regularization=regularization,
            regularization_uses=regularization_uses,
            resolutions=resolutions,
            resolution_weights=resolution_weights,
            bucket_sizes=self.sizes,
            bucket_groups=bucket_groups,
            run_length=self.run_length if order == "runs" else None,
            crop_limit=self.crop_limit if remainder == "merge" else None,
            base_bucket=base_bucket,
            enlarge=None if self.enlarge.all() else self.enlarge,
            equal_epochs=True if self.equal_epochs else None,
            global_batch=one_or_all(self.global_batch),
        )

    def plan(self, seed: int = 0, epoch: int = 0, done: Sequence[tuple[Any, int]] = ()) -> EpochPlan:
        """Plan an epoch, or what is left of it; see `plan_epoch`."""
        seed = integer("seed", seed)
        asked = self.asking.for_epoch(seed, whole("epoch", epoch, 0))
        stages = [(as_global_batch(size, self.n_buckets), whole("done", steps, 0)) for size, steps in done]
        stages.append((self.global_batch, 0))
        plan = self._arranged(asked.demand, stages[0][0], seed, epoch, 0)
        lost = Change(asked.unplaced, _nowhere(asked.unplaced), _nowhere(asked.unplaced), -1)
        plan = plan.with_ledger(asked.total, [(lost, LedgerReason.NO_BUCKET)])
        part, moved = 0, plan.ledger_rows
        for global_batch, steps in stages:
            if not np.array_equal(global_batch, plan.global_batch):
                part += 1
                rest = self._arranged(untrained(plan, self.n_buckets, moved), global_batch, seed, epoch, part)
                plan, moved = replace(rest, first_step=plan.first_step), rest.ledger_rows
            plan = plan.after(steps)
        return plan

    def moved_pairs(self) -> list[tuple[int, int]]:
        """(own bucket, bucket trained in) between which whole epochs move images, whichever the seed.

        Raises:
            PlanError: without `equal_epochs`: then what epochs train may never come round.
        """
        if not self.equal_epochs:
            raise PlanError("moves are only known for all epochs with equal_epochs=True")
        found: set[tuple[int, int]] = set()
        for epoch in range(self.period or 1):
            demand = self.asking.for_epoch(0, epoch).demand
            for change in self._remainder(demand, self.global_batch, 0, epoch, 0)[1]:
                found.update(zip(change.bucket.tolist(), change.to_bucket.tolist(), strict=True))
        return sorted(pair for pair in found if pair[0] != pair[1])

    def _steps_of_longest(self, global_batch: _GlobalBatch, seed: int) -> int:
        """Steps of the longest epoch; 0 where all are equally long by themselves."""
        period = self.period or 1
        if period == 1:
            return 0
        key = (seed, global_batch.tobytes())
        if key not in self._longest:
            lengths = []
            for epoch in range(period):
                demand, _ = self._remainder(self.asking.for_epoch(seed, epoch).demand, global_batch, seed, epoch, 0)
                lengths.append(int((-(-demand.per_bucket() // global_batch)).sum()))
            self._longest[key] = max(lengths)
        return self._longest[key]

    def _remainder(
        self, demand: Demand, global_batch: _GlobalBatch, seed: int, epoch: int, part: int
    ) -> tuple[Demand, list[Change]]:
        # What is left of an epoch trains where it was asked: whoever prepared the moves of whole epochs (cached
        # latents at the other size, say) need not prepare for every place at which a run may stop.
        name = "keep" if part and self.remainder in ("merge", "catch_all") else self.remainder
        context = RemainderContext(
            global_batch, seed, epoch, self.sizes, self.groups, self.crop_limit, self.base_bucket, self.enlarge
        )
        return REMAINDERS[name](demand, context)

    def _arranged(self, demand: Demand, global_batch: _GlobalBatch, seed: int, epoch: int, part: int) -> EpochPlan:
        asked = len(demand.image) if demand.times is None else int(demand.times.sum())
        demand, changes = self._remainder(demand, global_batch, seed, epoch, part)
        items, counts = sequence_items(demand, stream(Purpose.IMAGES, seed, epoch, part), shuffle=self.order != "file")
        cut = cut_batches(counts, global_batch)
        if part == 0:
            cut = split_batches(cut, self._steps_of_longest(global_batch, seed))
        rng = stream(Purpose.STEPS, seed, epoch, part)
        steps = ORDERS[self.order](cut, rng, self.run_length)
        if self.order != "file" and demand.times is not None:
            separate_repeats(items, cut, rng)
        plan = EpochPlan(
            world_size=self.world_size,
            global_batch=global_batch,
            accumulate=self.accumulate,
            seed=seed,
            epoch=epoch,
            images=self.fingerprint["images"],
            asked=asked,
            items=items,
            start=cut.start[steps],
            length=cut.length[steps],
            bucket_of_step=cut.bucket[steps],
            moves=self.asking.several_buckets or any(change.delta == 0 for change in changes),
            fingerprint={**self.fingerprint, "seed": seed, "epoch": epoch},
            bucket_sizes=self.sizes,
        )
        return plan.with_ledger(asked, [(c, _REASONS[self.remainder]) for c in changes])


def _share(name: str, value: Any) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share <= 1:
        raise PlanError(f"{name} is {value!r}, but is a share of the image: from 0 to 1, e.g. 0.25 for a quarter")
    return share


def _one_of(name: str, value: str, known: Iterable[str]) -> str:
    if value not in known:
        raise PlanError(f"{name} is {value!r}, but must be one of {', '.join(known)}")
    return value


def _groups(groups: Any, n_buckets: int) -> npt.NDArray[np.int64]:
    if groups is None:
        return np.zeros(n_buckets, dtype=np.int64)
    given = np.asarray(groups, dtype=np.int64)
    if given.shape != (n_buckets,):
        raise PlanError(f"bucket_groups has shape {list(given.shape)}, but there are {n_buckets} buckets")
    return given


def _enlarge(enlarge: Any, n_buckets: int, sizes: Any) -> npt.NDArray[np.bool_]:
    given = np.asarray(enlarge)
    if given.dtype != np.bool_ or given.shape not in ((), (n_buckets,)):
        raise PlanError(f"enlarge is {enlarge!r}, but must be true or false, for all or each of {n_buckets} buckets")
    if sizes is None and not given.all():
        raise PlanError("enlarge is false without bucket_sizes: which bucket is larger depends on them")
    every = np.empty(n_buckets, dtype=np.bool_)
    every[:] = given
    return every


def _base(base_bucket: int | None, n_buckets: int) -> int | None:
    if base_bucket is None:
        return None
    if not 0 <= (number := integer("base_bucket", base_bucket)) < n_buckets:
        raise PlanError(f"base_bucket is {base_bucket}, but there are buckets 0 to {n_buckets - 1}")
    return number


def _nowhere(image: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.full(len(image), -1, dtype=np.int32)
