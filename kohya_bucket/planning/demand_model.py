"""What an epoch is asked to train: repeats, regularization and resolutions turned into a demand."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import array_of
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.demand import Demand, smallest_ids
from kohya_bucket.planning.options import PlanOptions
from kohya_bucket.planning.resolutions import (
    RESOLUTION_MODES,
    choose_columns,
    cycle_places,
    stage_starts,
    weighted_cycle,
)
from kohya_bucket.planning.stream import Purpose, stream

Ids = npt.NDArray[np.integer]
Times = npt.NDArray[np.int64]
_HIGHEST_BUCKET = 2**24
_MOST_EPOCHS = 10_000  # that are looked at to find the longest


@dataclass(frozen=True)
class EpochDemand:
    """The demand of an epoch, and what it cannot serve.

    Attributes:
        demand: what is to be trained, of images that have a bucket.
        unplaced: [H] images without any bucket, once for every training asked of them.
        total: trainings asked, `unplaced` included.
    """

    demand: Demand
    unplaced: npt.NDArray[np.int32]
    total: int


class DemandModel:
    """Bucket ids with the options that say what an epoch is asked to train.

    Args:
        ids: [N] or [N, R], as `as_bucket_ids` gives them.
        n_buckets: K.
        options: of these, repeats, regularization and resolution_mode.

    Attributes:
        images_per_bucket: [K] images that have each bucket, without repeats.
        several_buckets: images have one bucket per resolution.
        everywhere: every image has a bucket, at every resolution.
        unplaced: numbers of the images that have no bucket at any.
        stage_of: [N] the stage of the schedule that trains each image, where `stages` says it.
        cycle: with weights, the resolutions in the order in which an image is trained at them.
        stage_begins: [S] the epochs at which the stages of a schedule begin; only 0 without one.
    """

    def __init__(self, ids: Ids, n_buckets: int, options: PlanOptions) -> None:
        if (ids.ndim == 2) != (options.resolution_mode is not None and options.stages is None):
            raise PlanError(
                f"bucket_ids has shape {list(ids.shape)} and resolution_mode is {options.resolution_mode!r}: "
                f"several resolutions need ids of shape [N, R] and one of {', '.join(RESOLUTION_MODES)}, or ids of "
                "shape [N] and stages"
            )
        self.ids = ids
        self.n_buckets = n_buckets
        self.mode = mode = options.mode
        self.repeats = parse_repeats(options.repeats, len(ids))
        self.regularization = _as_mask(options.regularization, len(ids))
        self.regularization_uses = options.regularization_uses
        self.stage_of = _as_stages(options, len(ids))
        self.cycle = weighted_cycle(options.resolution_weights, ids.shape[1]) if mode and mode.by_weight else None
        self.stage_begins = np.zeros(1, dtype=np.int64)
        if mode and mode.by_schedule:
            # A stage is a resolution, of which there is a column each; or `stages` says whose images it trains.
            stages = ids.shape[1] if ids.ndim == 2 else len(options.resolution_epochs or ()) + 1
            self.stage_begins = stage_starts(options.resolution_epochs, stages)
        self.several_buckets = ids.ndim == 2
        self._places: tuple[int, Times] | None = None  # the seed, and its `cycle_places`
        self.unplaced = np.zeros(0, dtype=np.intp)
        placed = ids
        self.everywhere = not ids.size or bool(ids.min() >= 0)
        if not self.everywhere:
            self.unplaced = np.flatnonzero((ids < 0) if ids.ndim == 1 else (ids < 0).all(axis=1))
            placed = ids[ids >= 0]
        self.images_per_bucket = np.bincount(placed.reshape(-1), minlength=n_buckets).astype(np.int64)

    def for_epoch(self, seed: int, epoch: int) -> EpochDemand:
        """What this epoch is asked to train."""
        image, bucket = self._rows(seed, epoch)
        times, unplaced = self._times(seed, epoch), self.unplaced
        if self.stage_of is not None:
            unplaced = unplaced[self.stage_of[unplaced] == self._stage(epoch)]
        row_times = None if times is None else times[image]
        total = len(image) + len(unplaced)
        if times is not None and row_times is not None:
            total = int(row_times.sum()) + int(times[unplaced].sum())
        _check_total(total, epoch)
        if times is not None:
            unplaced = np.repeat(unplaced, times[unplaced])
        demand = Demand(image, smallest_ids(bucket, self.n_buckets), row_times, self.n_buckets)
        return EpochDemand(demand, unplaced.astype(np.int32), total)

    def _stage(self, epoch: int) -> int:
        return int(np.searchsorted(self.stage_begins, epoch, side="right")) - 1

    def _rows(self, seed: int, epoch: int) -> tuple[npt.NDArray[np.int32], Ids]:
        """[M] images that the epoch trains, and the bucket of each: those that have one, at the resolutions in turn."""
        ids, n = self.ids, len(self.ids)
        at_each_resolution = self.mode is not None and not self.mode.one_per_epoch
        if at_each_resolution and self.everywhere:
            return np.repeat(np.arange(n, dtype=np.int32), ids.shape[1]), ids.reshape(-1)
        if at_each_resolution:
            at_image, at_column = np.nonzero(ids >= 0)
            return at_image.astype(np.int32), ids[at_image, at_column]
        if self.stage_of is not None:
            image = np.flatnonzero((ids >= 0) & (self.stage_of == self._stage(epoch)))
            return image.astype(np.int32), ids[image]
        if self.mode is not None:
            cycle = np.array([self._stage(epoch)]) if self.mode.by_schedule else self.cycle
            column = choose_columns(ids, cycle, self._places_of(seed), epoch)
            ids = ids[np.arange(n), column]
            if len(self.unplaced):
                ids = np.where(column >= 0, ids, -1)
        if len(self.unplaced):
            image = np.flatnonzero(ids >= 0)
            return image.astype(np.int32), ids[image]
        return np.arange(n, dtype=np.int32), ids

    def _places_of(self, seed: int) -> Times:
        if self._places is None or self._places[0] != seed:
            repeats = self.repeats.numerator
            differ = self.repeats.are_whole and len(repeats) and np.ptp(repeats) > 0
            self._places = (seed, cycle_places(self.ids, seed, repeats if differ else None))
        return self._places[1]

    def distinct_epochs(self) -> Sequence[int] | None:
        """Epochs of which one trains as much of every bucket as any other does; None if there may be no such few."""
        if self.regularization is not None or not self.repeats.are_whole:
            return None
        if self.cycle is not None:
            return range(len(self.cycle))
        if self.mode is None or not self.mode.one_per_epoch:
            return range(1)
        if self.mode.by_schedule:
            return list(map(int, self.stage_begins))
        available = np.unique((self.ids >= 0).sum(axis=1)).tolist()
        round_of_all = math.lcm(*filter(None, available))
        return range(round_of_all) if round_of_all <= _MOST_EPOCHS else None

    def most_times(self) -> Times:
        """[N] how often an epoch asks for each image at most."""
        most: Times = -(-self.repeats.numerator // self.repeats.denominator)
        if self.regularization is not None:
            usable, others = self._regularization_and_others(self.regularization)
            uses = int(most[others].sum()) if self.regularization_uses is None else self.regularization_uses
            most[self.regularization] = 0
            most[usable] = -(-uses // max(len(usable), 1))
        return most

    def _times(self, seed: int, epoch: int) -> Times | None:
        """[N] how often each image is asked for in this epoch; None stands for once each."""
        if self.repeats.once and self.regularization is None:
            return None
        before = self.repeats.before(epoch, seed)
        times = self.repeats.before(epoch + 1, seed) - before
        if self.regularization is not None:
            usable, others = self._regularization_and_others(self.regularization)
            used_before, uses = int(before[others].sum()), int(times[others].sum())
            if self.regularization_uses is not None:
                used_before, uses = self.regularization_uses * epoch, self.regularization_uses
            times[self.regularization] = 0
            times[usable] = regularization_times(len(usable), used_before, uses, seed)
        return times

    def _regularization_and_others(self, mask: npt.NDArray[np.bool_]) -> tuple[Ids, Ids]:
        """Images of either kind that have a bucket."""
        has_bucket = np.ones(len(self.ids), dtype=np.bool_)
        has_bucket[self.unplaced] = False
        return np.flatnonzero(mask & has_bucket), np.flatnonzero(~mask & has_bucket)


def as_bucket_ids(bucket_ids: npt.ArrayLike) -> tuple[Ids, int]:
    """Bucket numbers as a checked array, [N] or [N, R], and the highest of them (-1 if there is none).

    Raises:
        PlanError: another shape, fractions, numbers below -1 or beyond any bucket set.
    """
    ids = array_of("bucket_ids", bucket_ids)
    if ids.size == 0 and ids.ndim == 1:
        return np.zeros(0, dtype=np.int32), -1
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        raise PlanError(
            f"bucket_ids has shape {list(ids.shape)} and dtype {ids.dtype}, but must be whole numbers, [N] or [N, R]"
        )
    if ids.size and ids.min() < -1:
        raise PlanError(f"bucket_ids holds {ids.min()}: buckets count from 0, and -1 means no bucket")
    highest = int(ids.max()) if ids.size else -1
    if highest > _HIGHEST_BUCKET:
        raise PlanError(f"bucket_ids holds {highest}: number the buckets from 0 without gaps, as np.unique does")
    # Unsigned numbers know no -1, and numpy counts no 64-bit ones; plans and fingerprints are the same for all widths.
    return (ids.astype(np.int32) if ids.dtype.kind == "u" else ids), highest


def _as_stages(options: PlanOptions, n: int) -> npt.NDArray[np.int64] | None:
    if options.stages is None:
        return None
    if options.mode is None or not options.mode.by_schedule:
        raise PlanError("stages is set, which has no effect without resolution_mode = 'schedule': set that too")
    if options.regularization is not None:
        raise PlanError("stages is set with regularization, which is drawn in every epoch: leave out one of them")
    stages, last = array_of("stages", options.stages), len(options.resolution_epochs or ())
    if stages.shape != (n,) or (n and (stages.dtype.kind not in "iu" or not 0 <= stages.min() <= stages.max() <= last)):
        raise PlanError(
            f"stages is {stages.dtype} of shape {list(stages.shape)}, but must be a whole number from 0 to {last} for "
            f"each of {n} images: the stage whose epochs train it, of those that resolution_epochs makes"
        )
    return stages.astype(np.int64)


def _check_total(total: int, epoch: int) -> None:
    """Refuse more trainings than a plan can hold, or than this machine has memory to plan."""
    asked, machine = f"epoch {epoch} is asked to train {total:,} images, repeats counted", _machine_memory()
    if total > MOST_TRAININGS:
        raise PlanError(f"{asked}, but a plan holds at most {MOST_TRAININGS:,}: lower repeats and train more epochs")
    if machine is not None and total * _BYTES > machine:
        raise PlanError(
            f"{asked}: to plan it takes about {total * _BYTES / 2**30:,.0f} GiB of memory, and this machine has "
            f"{machine / 2**30:,.0f} GiB: lower repeats and train more epochs"
        )


def _as_mask(mask: npt.ArrayLike | None, n: int) -> npt.NDArray[np.bool_] | None:
    if mask is None:
        return None
    array = array_of("regularization", mask)
    if array.shape != (n,) or array.dtype != np.bool_:
        raise PlanError(f"regularization has shape {list(array.shape)} and dtype {array.dtype}, but must be [{n}] bool")
    return array


_BYTES = 50  # of a training, at the peak: order keys, places and row numbers of 8 bytes each, the plan itself of 4


def _machine_memory() -> int | None:
    """Bytes; None where the system does not tell (Windows, which refuses memory that it does not have)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


Counts = npt.NDArray[np.int64]
_LARGEST_DENOMINATOR = 10_000
MOST_TRAININGS = 2**31 - 1
"""Of an epoch, and so of one image too."""
_RANGE = f"0 to {MOST_TRAININGS:,}"


class Repeats:
    """Repeats of N images as exact ratios.

    An image with ratio p/q and phase s (0 <= s < q) has been trained `(e*p + s) // q - s // q` times before
    epoch e. So any q epochs in a row train it exactly p times, and any k of them within one of k*p/q. The
    phases are spread evenly over the images, in a random order that depends on the seed alone: every epoch
    has its fair share.
    """

    def __init__(self, n: int, numerator: int | Counts, denominator: int | Counts = 1) -> None:
        """One ratio for all of n images, or [n] of them."""
        self.numerator, self.denominator = (
            np.broadcast_to(np.asarray(part, dtype=np.int64), (n,)) for part in (numerator, denominator)
        )
        self.once = np.ndim(numerator) == 0 and numerator == denominator

    @property
    def are_whole(self) -> bool:
        """No image has a fraction: every epoch trains the same."""
        return bool((self.denominator == 1).all())

    def _phase(self, seed: int) -> Counts:
        numerator, denominator = self.numerator, self.denominator
        phase = np.zeros(len(numerator), dtype=np.int64)
        # The images of one ratio share out its phases; one alone has phase 0.
        order = np.flatnonzero(denominator > 1)
        order = order[np.lexsort((numerator[order], denominator[order]))]
        begins = np.flatnonzero(np.diff(numerator[order], prepend=-1) | np.diff(denominator[order], prepend=-1))
        drawn = stream(Purpose.PHASES, seed)
        fresh = drawn.get_state()
        for begin, end in pairwise([*begins.tolist(), len(order)]):
            if end - begin > 1:
                rows = order[begin:end]
                drawn.set_state(fresh)
                drawn.shuffle(rows)
                phase[rows] = np.arange(len(rows), dtype=np.int64) * denominator[rows] // len(rows)
        return phase

    def before(self, epoch: int, seed: int) -> Counts:
        """[N] times that each image is trained in the epochs 0 to `epoch` - 1 together."""
        return (epoch * self.numerator + self._phase(seed)) // self.denominator


def parse_repeats(repeats: object, n: int) -> Repeats:
    """`Repeats` of N images.

    Args:
        repeats: None (once), a number or a `Fraction` for all, or [N] of them. Floats are read as the nearest
            ratio with a denominator of at most 10,000: 0.1 is one tenth, not the binary number beside it.

    Raises:
        PlanError: negative, non-finite or enormous values, another length, floats that no such ratio is near to.
    """
    if isinstance(repeats, (int, np.integer)) and not isinstance(repeats, bool):
        if not 0 <= repeats <= MOST_TRAININGS:
            raise PlanError(f"repeats is {repeats}, but must be {_RANGE}")
        return Repeats(n, int(repeats))
    values = array_of("repeats", 1 if repeats is None else repeats)
    if values.ndim == 0:
        return Repeats(n, *_ratio(values.item()).as_integer_ratio())
    if values.shape != (n,):
        raise PlanError(f"repeats has shape {list(values.shape)}, but there are {n} images: give one for each")
    if values.dtype.kind in "iu":
        for value in (values.min(initial=0), values.max(initial=0)):
            if not 0 <= value <= MOST_TRAININGS:
                raise PlanError(f"repeats holds {value}, but must be {_RANGE}")
        return Repeats(n, values.astype(np.int64))
    values, inverse = np.unique(values.astype(np.float64) if values.dtype.kind == "f" else values, return_inverse=True)
    ratios = np.array([_ratio(v).as_integer_ratio() for v in values.tolist()], dtype=np.int64).reshape(-1, 2)
    return Repeats(n, *ratios[inverse.reshape(-1)].T)


def _ratio(value: Any) -> Fraction:
    try:
        exact = Fraction(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise PlanError(f"repeats holds {value!r}, which is not a number of times to train an image") from error
    if not 0 <= exact <= MOST_TRAININGS:
        raise PlanError(f"repeats holds {value}, but must be {_RANGE}")
    ratio = exact.limit_denominator(_LARGEST_DENOMINATOR)
    if abs(ratio - exact) > Fraction(1, 10**7):
        raise PlanError(
            f"repeats holds {value}, which is not a ratio with a denominator of at most {_LARGEST_DENOMINATOR}: round "
            "it, e.g. to two digits"
        )
    return ratio


def regularization_times(n: int, used_before: int, uses: int, seed: int) -> npt.NDArray[np.int64]:
    """[n] times that each of n regularization images is trained in an epoch.

    The images stand in a circle in an order that depends on the seed alone, and each epoch goes on where the
    last one stopped. So over any number of epochs in a row, the counts of two images differ by at most one.
    (sd-scripts trains the first `uses` images of the list in every epoch: its issue #2096.)

    Args:
        n: images in the set.
        used_before: uses in all epochs before this one together.
        uses: uses in this epoch, normally as many as there are trainings of other images.
    """
    times = np.full(n, uses // n if n else 0, dtype=np.int64)
    if n == 0 or uses == 0:
        return times
    circle = np.arange(n, dtype=np.int64)
    stream(Purpose.REGULARIZATION, seed).shuffle(circle)
    start = used_before % n
    times[circle[(start + np.arange(uses % n)) % n]] += 1
    return times
