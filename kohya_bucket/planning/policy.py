"""What a remainder policy is: a value that says everything that is to be known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.demand import Change, Demand
from kohya_bucket.planning.ledger import LedgerReason

__all__ = ["RemainderContext", "RemainderPolicy", "change_of", "moved_to"]


@dataclass(frozen=True)
class RemainderContext:
    """What a policy may look at besides the demand.

    Attributes:
        global_batch: [K] images that fill one step of each bucket, on all ranks together.
        seed, epoch: for what differs from epoch to epoch.
        bucket_sizes: [K, 2] (width, height), or None where they are not known.
        groups: [K] images never move between buckets of different groups (e.g. two datasets).
        max_crop: share of an image that may be cropped off to fit it into another bucket.
        base_bucket: bucket of the `catch_all` batches; None to take the squarest, then the largest.
        no_upscale: [K] whether images of a bucket must not be moved to one that is larger than it in a side.
    """

    global_batch: npt.NDArray[np.int64]
    seed: int
    epoch: int
    bucket_sizes: IntArray | None
    groups: npt.NDArray[np.int64]
    max_crop: float
    base_bucket: int | None
    no_upscale: npt.NDArray[np.bool_]

    @property
    def sizes(self) -> IntArray:
        """`bucket_sizes`, for a policy that says that it needs them."""
        if self.bucket_sizes is None:
            raise PlanError("the policy reads bucket_sizes, but does not say that it needs them")
        return self.bucket_sizes

    def fits(self, k: int) -> npt.NDArray[np.bool_]:
        """[K] buckets that images of bucket k may be moved to without being enlarged against `no_upscale`."""
        if self.bucket_sizes is None or not self.no_upscale[k]:
            return np.ones(len(self.no_upscale), dtype=np.bool_)
        fits: npt.NDArray[np.bool_] = (self.bucket_sizes <= self.bucket_sizes[k]).all(axis=1)
        return fits


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
        heeds_max_crop: `max_crop` decides what it does.
        enlarges: it may train images in a larger bucket than their own, whatever that bucket is.
    """

    name: str
    text: str
    apply: Callable[[Demand, RemainderContext], tuple[Demand, list[Change]]]
    reason: LedgerReason | None = None
    moves_images: bool = False
    needs_sizes: str = ""
    heeds_max_crop: bool = False
    enlarges: bool = False

    @property
    def leaves_out(self) -> bool:
        """It leaves images out, so that all batches are full."""
        return self.reason is LedgerReason.DROPPED


def change_of(
    demand: Demand, rows: npt.NDArray[np.intp], delta: int, to_bucket: npt.NDArray[np.integer] | None = None
) -> Change:
    """Ledger rows for one training each of `rows`."""
    bucket = demand.bucket[rows].astype(np.int32)
    to = bucket if to_bucket is None else to_bucket.astype(np.int32)
    return Change(demand.image[rows].astype(np.int32), bucket, to, delta)


def moved_to(
    demand: Demand, rows: npt.NDArray[np.intp], to_bucket: npt.NDArray[np.integer]
) -> tuple[Demand, list[Change]]:
    """One training each of `rows` in another bucket, and the ledger rows of that."""
    if len(rows) == 0:
        return demand, []
    less = demand.changed(rows, np.full(len(rows), -1, dtype=np.int64))
    return less.extended(demand.image[rows], to_bucket), [change_of(demand, rows, 0, to_bucket)]
