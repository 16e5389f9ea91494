"""What an epoch is asked to train: repeats, regularization and resolutions turned into a demand."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import array_of
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.demand import Demand, smallest_ids
from kohya_bucket.planning.options import PlanOptions
from kohya_bucket.planning.repeats import MOST_TRAININGS, parse_repeats, regularization_times
from kohya_bucket.planning.resolutions import RESOLUTION_MODES, choose_columns, cycle_places, weighted_cycle

Ids = npt.NDArray[np.integer]
Times = npt.NDArray[np.int64]
_HIGHEST_BUCKET = 2**24


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
        options: of these, repeats, regularization and resolutions.

    Attributes:
        images_per_bucket: [K] images that have each bucket, without repeats.
        several_buckets: images have one bucket per resolution.
        everywhere: every image has a bucket, at every resolution.
    """

    def __init__(self, ids: Ids, n_buckets: int, options: PlanOptions) -> None:
        if (ids.ndim == 2) != (options.resolutions is not None):
            raise PlanError(
                f"bucket_ids has shape {list(ids.shape)} and resolutions is {options.resolutions!r}: "
                "several resolutions need ids of shape [N, R] and one of " + ", ".join(RESOLUTION_MODES)
            )
        self.ids = ids
        self.n_buckets = n_buckets
        self.mode = mode = options.mode
        self.repeats = parse_repeats(options.repeats, len(ids))
        self.regularization = _as_mask(options.regularization, len(ids))
        self.uses = options.regularization_uses
        self.cycle = weighted_cycle(options.resolution_weights, ids.shape[1]) if mode and mode.by_weight else None
        self.several_buckets = ids.ndim == 2
        self._places: tuple[int, Times] | None = None
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
        times = self._times(seed, epoch)
        if isinstance(times, int):
            total = (len(image) + len(self.unplaced)) * times
            _check_total(total, epoch)
            row_times = None if times == 1 else np.full(len(image), times, dtype=np.int64)
            unplaced = np.repeat(self.unplaced, times)
        else:
            row_times = times[image]
            total = int(row_times.sum()) + int(times[self.unplaced].sum())
            _check_total(total, epoch)
            unplaced = np.repeat(self.unplaced, times[self.unplaced])
        demand = Demand(image, smallest_ids(bucket, self.n_buckets), row_times, self.n_buckets)
        return EpochDemand(demand, unplaced.astype(np.int32), total)

    def _rows(self, seed: int, epoch: int) -> tuple[npt.NDArray[np.int32], Ids]:
        ids, n = self.ids, len(self.ids)
        each = self.mode is not None and not self.mode.one_per_epoch
        if each and self.everywhere:
            return np.repeat(np.arange(n, dtype=np.int32), ids.shape[1]), ids.reshape(-1)
        if each:
            at_image, at_column = np.nonzero(ids >= 0)
            return at_image.astype(np.int32), ids[at_image, at_column]
        if self.mode is not None:
            column = choose_columns(ids, self.cycle, self._places_of(seed), epoch)
            ids = ids[np.arange(n), column]
            if len(self.unplaced):
                ids = np.where(column >= 0, ids, -1)
        if len(self.unplaced):
            image = np.flatnonzero(ids >= 0)
            return image.astype(np.int32), ids[image]
        return np.arange(n, dtype=np.int32), ids

    def _places_of(self, seed: int) -> Times:
        if self._places is None or self._places[0] != seed:
            whole = None if isinstance(self.repeats, int) else self.repeats.whole()
            self._places = (seed, cycle_places(self.ids, seed, whole))
        return self._places[1]

    def period(self) -> int | None:
        """After how many epochs the number of trainings of every bucket comes round; None if it may not."""
        if self.regularization is not None or not (isinstance(self.repeats, int) or self.repeats.are_whole):
            return None
        if self.cycle is not None:
            return len(self.cycle)
        if self.mode is None or not self.mode.one_per_epoch:
            return 1
        available = np.unique((self.ids >= 0).sum(axis=1))
        return int(np.lcm.reduce(available[available > 0], initial=1))

    def most_times(self) -> Times:
        """[N] how often an epoch asks for each image at most."""
        repeats = self.repeats
        if isinstance(repeats, int):
            most = np.full(len(self.ids), repeats, dtype=np.int64)
        else:
            most = -(-repeats.numerator // repeats.denominator)
        if self.regularization is not None:
            usable, others = self._regularization_and_others()
            uses = int(most[others].sum()) if self.uses is None else self.uses
            most[self.regularization] = 0
            most[usable] = -(-uses // max(len(usable), 1))
        return most

    def _times(self, seed: int, epoch: int) -> int | Times:
        """How often each image is asked for in this epoch, or one number for all."""
        if isinstance(self.repeats, int):
            if self.regularization is None:
                return self.repeats
            times = np.full(len(self.ids), self.repeats, dtype=np.int64)
            before = times * epoch
        else:
            before, after = self.repeats.before(epoch, seed), self.repeats.before(epoch + 1, seed)
            times = after - before
        if self.regularization is not None:
            usable, others = self._regularization_and_others()
            used_before, uses = int(before[others].sum()), int(times[others].sum())
            if self.uses is not None:
                used_before, uses = self.uses * epoch, self.uses
            times[self.regularization] = 0
            times[usable] = regularization_times(len(usable), used_before, uses, seed)
        return times

    def _regularization_and_others(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Images of either kind that have a bucket."""
        has_bucket = np.ones(len(self.ids), dtype=np.bool_)
        has_bucket[self.unplaced] = False
        regularization = np.zeros_like(has_bucket) if self.regularization is None else self.regularization
        return np.flatnonzero(regularization & has_bucket), np.flatnonzero(~regularization & has_bucket)


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


def _check_total(total: int, epoch: int) -> None:
    if total > MOST_TRAININGS:
        raise PlanError(
            f"epoch {epoch} is asked to train {total:,} images, repeats counted, but a plan holds at most "
            f"{MOST_TRAININGS:,}: lower repeats and train more epochs"
        )
    check_memory(total, epoch)


def _as_mask(mask: npt.ArrayLike | None, n: int) -> npt.NDArray[np.bool_] | None:
    if mask is None:
        return None
    given = array_of("regularization", mask)
    if given.shape != (n,) or given.dtype != np.bool_:
        raise PlanError(f"regularization has shape {list(given.shape)} and dtype {given.dtype}, but must be [{n}] bool")
    return given


_BYTES = 50  # of a training, at the peak: order keys, places and row numbers of 8 bytes each, the plan itself of 4


def check_memory(total: int, epoch: int) -> None:
    """Refuse to plan so many trainings where that takes more memory than the machine has.

    Raises:
        PlanError: with what it would take and what there is.
    """
    there = _machine_memory()
    if there is not None and total * _BYTES > there:
        raise PlanError(
            f"epoch {epoch} is asked to train {total:,} images, repeats counted: to plan it takes about "
            f"{total * _BYTES / 2**30:,.0f} GiB of memory, and this machine has {there / 2**30:,.0f} GiB: lower "
            "repeats and train more epochs"
        )


def _machine_memory() -> int | None:
    """Bytes; None where the system does not tell (Windows, which refuses memory that it does not have)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
