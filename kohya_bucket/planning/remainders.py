"""What becomes of the images that do not fill a global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.batch_sizes import pixels_of
from kohya_bucket.planning.demand import Demand
from kohya_bucket.planning.ledger import LedgerReason, Rows, ledger_rows
from kohya_bucket.planning.stream import Purpose, stream


@dataclass(frozen=True)
class RemainderContext:
    """What a policy may look at besides the demand.

    Attributes:
        global_batch: [K] images that fill one step of each bucket, on all ranks together.
        seed, epoch: for what differs from epoch to epoch.
        bucket_sizes: [K, 2] (width, height), or None where they are not known.
        groups: [K] images never move between buckets of different groups (e.g. two datasets).
        merge_max_crop: share of an image that may be cropped off to fit it into another bucket.
        base_bucket: bucket of the `catch_all` batches; None to take the squarest, then the largest.
        no_upscale: [K] whether images of a bucket must not be moved to one that is larger than it in a side.
    """

    global_batch: npt.NDArray[np.int64]
    seed: int
    epoch: int
    bucket_sizes: IntArray | None
    groups: npt.NDArray[np.int64]
    merge_max_crop: float
    base_bucket: int | None
    no_upscale: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class RemainderPolicy:
    """What becomes of the images that do not fill a global batch.

    A policy changes what is asked for before batches are cut, and says so in rows for the ledger.

    Attributes:
        name: in options, configs and saved states.
        text: what becomes of them, for help and documentation.
        apply: `(demand, context) -> (demand, changes)`.
        reason: of its changes, in the ledger; None where it changes nothing.
        moves_images: it trains images in other buckets than their own.
        needs_sizes: why it cannot do without `bucket_sizes`; empty where it can.
        uses_max_crop: `merge_max_crop` decides what it does.
        enlarges: it may train images in a larger bucket than their own, whatever that bucket is.
        uses_base_bucket: `base_bucket` decides what it does.
    """

    name: str
    text: str
    apply: Callable[[Demand, RemainderContext], tuple[Demand, list[Rows]]]
    reason: LedgerReason | None = None
    moves_images: bool = False
    needs_sizes: str = ""
    uses_max_crop: bool = False
    enlarges: bool = False
    uses_base_bucket: bool = False

    @property
    def leaves_out(self) -> bool:
        """It leaves images out, so that all batches are full."""
        return self.reason is LedgerReason.DROPPED


def change_of(
    demand: Demand, rows: npt.NDArray[np.intp], delta: int, to_bucket: npt.NDArray[np.integer] | None = None
) -> Rows:
    """Ledger rows for one training each of `rows`."""
    bucket = demand.bucket[rows]
    return ledger_rows(demand.image[rows], bucket, bucket if to_bucket is None else to_bucket, delta)


def moved_to(
    demand: Demand, rows: npt.NDArray[np.intp], to_bucket: npt.NDArray[np.integer]
) -> tuple[Demand, list[Rows]]:
    """One training each of `rows` in another bucket, and the ledger rows of that."""
    if len(rows) == 0:
        return demand, []
    return demand.changed(rows, -1).extended(demand.image[rows], to_bucket), [change_of(demand, rows, 0, to_bucket)]


def take_in_rotation(demand: Demand, want: npt.NDArray[np.int64], seed: int, epoch: int) -> npt.NDArray[np.intp]:
    """Rows of the demand, `want[k]` trainings of each bucket k.

    Each bucket's trainings stand in a circle whose order depends on the seed alone: all first trainings of its
    images, then all second ones, and so on. Epoch e takes the next `want` places after those of epoch e - 1,
    so while the demand stays the same, over any number of epochs two trainings are taken equally often or
    once apart. A bucket that is asked for more than it holds is gone round several times.

    Returns:
        [sum(want)] rows, bucket by bucket; empty buckets give none.
    """
    order = np.argsort(demand.bucket, kind="stable")
    rows_in = np.bincount(demand.bucket, minlength=demand.n_buckets)
    ends = np.cumsum(rows_in)
    times = demand.all_times()
    rng = stream(Purpose.ROTATION, seed)
    chosen: list[npt.NDArray[np.intp]] = []
    for k in np.flatnonzero(rows_in):
        rows = order[ends[k] - rows_in[k] : ends[k]]
        rng.shuffle(rows)  # also where none is wanted: the circles of other buckets stay as they are
        most = int(times[rows].max())
        if want[k] > 0 and most > 0:
            circle = np.concatenate([rows[times[rows] > j] for j in range(most)])
            chosen.append(circle[(epoch * int(want[k]) % len(circle) + np.arange(want[k])) % len(circle)])
    return np.concatenate(chosen) if chosen else np.zeros(0, dtype=np.intp)


def _keep(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Rows]]:  # noqa: ARG001
    """The demand as it is: ceil(n / global batch) batches of each bucket, as sd-scripts makes them.

    The short batch is spread over the ranks as evenly as can be; with fewer images than ranks, the ranks left
    over train an image of the same batch again (see `EpochPlan`).
    """
    return demand, []


KEEP = RemainderPolicy("keep", "trains them as a short batch", _keep)


def _in_rotation(
    demand: Demand, want: npt.NDArray[np.int64], delta: int, context: RemainderContext
) -> tuple[Demand, list[Rows]]:
    """`want[k]` trainings of each bucket k once more or less, others in each epoch."""
    rows = take_in_rotation(demand, want, context.seed, context.epoch)
    return (demand.changed(rows, delta), [change_of(demand, rows, delta)]) if len(rows) else (demand, [])


def _pad(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Rows]]:
    """Ask each bucket for as many more trainings as fill its last batch, of other images in each epoch.

    The added trainings are spread over the bucket's batches like any repeat, not heaped into the last one.
    """
    return _in_rotation(demand, -demand.per_bucket() % context.global_batch, +1, context)


PAD = RemainderPolicy("pad", "fills it with repeats from the bucket", _pad, LedgerReason.PADDED)


def _drop(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Rows]]:
    """Leave out each bucket's remainder in rotation; of buckets that never fill a batch, `small_buckets` decides."""
    return _in_rotation(demand, demand.per_bucket() % context.global_batch, -1, context)


DROP = RemainderPolicy("drop", "leaves a different part out each epoch", _drop, LedgerReason.DROPPED)


def _merge(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Rows]]:
    """Move remainders, in rotation, to the bucket that crops off least of them; nothing is lost.

    Buckets are taken from the fewest images to the most. A bucket whose remainder has moved is settled: it
    takes in nothing more, so every move leaves one short batch fewer. Where no other bucket is within
    `merge_max_crop`, the remainder stays as a short batch. Images that must not be enlarged go to buckets no larger in
    either side, and pixels that scaling takes from them count like those that are cropped off.
    """
    target, moved = _targets(demand.per_bucket(), context)
    rows = take_in_rotation(demand, moved, context.seed, context.epoch)
    return moved_to(demand, rows, target[demand.bucket[rows]])


def _targets(
    counts: npt.NDArray[np.int64], context: RemainderContext
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """([K] where each bucket's remainder goes, [K] how many images of its own go there).

    A bucket may pass on no more than its own images: what it takes in before it is settled counts towards its
    full batches first.
    """
    sizes = context.bucket_sizes
    assert sizes is not None  # the policy says that it needs them
    aspects, areas = sizes[:, 0] / np.maximum(sizes[:, 1], 1), pixels_of(sizes)
    held = counts.copy()
    target = np.arange(len(counts), dtype=np.int32)
    moved = np.zeros(len(counts), dtype=np.int64)
    open_ = counts > 0
    for k in sorted(np.flatnonzero(open_).tolist(), key=lambda b: (counts[b], b)):
        # Behind this line nothing moves into k any more, so its own remainder is final.
        remainder = int(held[k] % context.global_batch[k])
        open_[k] = False
        if remainder == 0 or remainder > counts[k]:
            continue
        # Of the buckets that are still open and may take these images, the one that crops least.
        others = np.flatnonzero(open_ & (context.groups == context.groups[k]))
        if context.no_upscale[k]:
            others = others[(sizes[others] <= sizes[k]).all(axis=1)]
            crop = 1 - areas[others] / areas[k]
        else:
            crop = 1 - np.minimum(aspects[others] / aspects[k], aspects[k] / aspects[others])
        if not len(others) or crop.min() > context.merge_max_crop:
            continue
        best = int(others[np.argmin(crop)])
        target[k], moved[k] = best, remainder
        held[k] -= remainder
        held[best] += remainder
    return target, moved


MERGE = RemainderPolicy(
    "merge",
    "trains them in the next best bucket",
    _merge,
    LedgerReason.MERGED,
    moves_images=True,
    needs_sizes="the crop into another bucket depends on them",
    uses_max_crop=True,
)


def _catch_all(demand: Demand, context: RemainderContext) -> tuple[Demand, list[Rows]]:
    """Move every bucket's remainder, in rotation, to the base bucket of its group.

    The base bucket's own last batch may be short; no other is, except of buckets whose images would be enlarged
    and must not be. Nothing is lost.

    Raises:
        PlanError: no base bucket is named, and without `bucket_sizes` none can be chosen.
    """
    if context.base_bucket is None and context.bucket_sizes is None:
        raise PlanError("remainder='catch_all' needs base_bucket, or bucket_sizes to choose the squarest bucket")
    base = np.arange(demand.n_buckets, dtype=np.int32)
    for group in np.unique(context.groups):
        members = np.flatnonzero(context.groups == group)
        if context.base_bucket is not None and context.groups[context.base_bucket] == group:
            base[members] = context.base_bucket
        elif context.bucket_sizes is not None:
            base[members] = members[_squarest(context.bucket_sizes[members])]
    if context.bucket_sizes is not None:
        enlarged = context.no_upscale & (context.bucket_sizes[base] > context.bucket_sizes).any(axis=1)
        base[enlarged] = np.flatnonzero(enlarged)
    counts = demand.per_bucket()
    moved = np.where(base == np.arange(demand.n_buckets), 0, counts % context.global_batch)
    rows = take_in_rotation(demand, moved, context.seed, context.epoch)
    return moved_to(demand, rows, base[demand.bucket[rows]])


def _squarest(sizes: IntArray) -> int:
    """Number of the size nearest to a square; of several, the one with the largest area, then the first."""
    wide = np.maximum(sizes[:, 0], sizes[:, 1]) / np.maximum(np.minimum(sizes[:, 0], sizes[:, 1]), 1)
    return int(np.lexsort((-pixels_of(sizes), wide))[0])


CATCH_ALL = RemainderPolicy(
    "catch_all",
    "trains them together at the squarest bucket's size",
    _catch_all,
    LedgerReason.CAUGHT,
    moves_images=True,
    enlarges=True,
    uses_base_bucket=True,
)


REMAINDERS: dict[str, RemainderPolicy] = {policy.name: policy for policy in (KEEP, PAD, DROP, MERGE, CATCH_ALL)}
"""By name, as they are offered."""


def policies_of(remainder: str, small_buckets: str | None) -> tuple[RemainderPolicy, ...]:
    """What `remainder` names; and where it leaves images out, for buckets that never fill a batch, another policy."""
    policy, small = REMAINDERS[remainder], REMAINDERS[small_buckets or KEEP.name]
    return (policy,) if not policy.leaves_out or small is policy else (policy, small)


def apply_policies(
    policies: tuple[RemainderPolicy, ...], demand: Demand, whole: Demand, context: RemainderContext
) -> tuple[Demand, list[Rows]]:
    """Settle the remainder of every bucket.

    Args:
        policies: one for all buckets; or two, the second for buckets of which the whole epoch asks less than a global
            batch, so that the first would leave them out in every epoch.
        demand: what is to be trained: the epoch, or what is left of it.
        whole: what the whole epoch asks.
        context: see `RemainderContext`.
    """
    stages = [(policies[0], context)]
    if len(policies) > 1:
        small, full = whole.per_bucket() < context.global_batch, np.int64(1)
        # With one image to a batch, a bucket has no remainder: each policy sees only what is its own.
        stages = [
            (policies[1], replace(context, global_batch=np.where(small, context.global_batch, full))),
            (policies[0], replace(context, global_batch=np.where(small, full, context.global_batch))),
        ]
    all_changes: list[Rows] = []
    for policy, seen in stages:
        demand, changes = policy.apply(demand, seen)
        for rows in changes:
            rows["reason"] = policy.reason
        all_changes += changes
    return demand, all_changes
