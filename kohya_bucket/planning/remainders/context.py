"""What a remainder policy may look at."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.planning.demand import Change, Demand

__all__ = ["RemainderContext", "change_of"]


@dataclass(frozen=True)
class RemainderContext:
    """Settings shared by the policies.

    Attributes:
        global_batch: [K] images that fill one step of each bucket, on all ranks together.
        seed, epoch: for what differs from epoch to epoch.
        bucket_sizes: [K, 2] (width, height), or None where they are not known.
        groups: [K] images never move between buckets of different groups (e.g. two datasets).
        crop_limit: share of an image that `merge` may crop off to fit it into another bucket.
        base_bucket: bucket of the `catch_all` batches; None to take the squarest, then the largest.
        enlarge: [K] whether images of a bucket may be moved to one that is larger than it in a side.
    """

    global_batch: npt.NDArray[np.int64]
    seed: int
    epoch: int
    bucket_sizes: IntArray | None
    groups: npt.NDArray[np.int64]
    crop_limit: float
    base_bucket: int | None
    enlarge: npt.NDArray[np.bool_]

    def fits(self, k: int) -> npt.NDArray[np.bool_]:
        """[K] buckets that images of bucket k may be moved to without being enlarged against `enlarge`."""
        if self.enlarge[k] or self.bucket_sizes is None:
            return np.ones(len(self.enlarge), dtype=np.bool_)
        fits: npt.NDArray[np.bool_] = (self.bucket_sizes <= self.bucket_sizes[k]).all(axis=1)
        return fits


def change_of(
    demand: Demand, rows: npt.NDArray[np.intp], delta: int, to_bucket: npt.NDArray[np.integer] | None = None
) -> Change:
    """Ledger rows for one training each of `rows`."""
    bucket = demand.bucket[rows].astype(np.int32)
    to = bucket if to_bucket is None else to_bucket.astype(np.int32)
    return Change(demand.image[rows].astype(np.int32), bucket, to, delta)
