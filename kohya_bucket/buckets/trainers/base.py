"""What the trainers' rules share: one decision, and everything else follows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays.build_placement import place_from_data, place_into_set
from kohya_bucket.buckets.bucket import Bucket, BucketSet
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.rule import place_one
from kohya_bucket.buckets.sizes import FloatArray, IntArray, as_sizes
from kohya_bucket.errors import BucketSettingsError

__all__ = ["DataTrainer", "SetTrainer", "positive", "round_to_multiple"]


def positive(**values: float) -> None:
    """Refuse settings below 1 by name."""
    for name, value in values.items():
        if value < 1:
            raise BucketSettingsError(f"{name} is {value}, but must be 1 or more")


def round_to_multiple(x: float, multiple: int) -> int:
    """Python's `round(x / multiple) * multiple`: half to even."""
    return round(x / multiple) * multiple


class SetTrainer(ABC):
    """A trainer with a bucket set; `_nearest` decides."""

    def __init__(self, bucket_set: BucketSet) -> None:
        self._bucket_set = bucket_set

    @property
    def bucket_set(self) -> BucketSet:
        return self._bucket_set

    @abstractmethod
    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        """[N] readable widths and heights -> [N] positions in the set."""

    def place(self, sizes: Any) -> Placement:
        """Place N images; rows with a side < 1 count as unreadable."""
        array = as_sizes(sizes)
        return place_into_set(array, self._bucket_set, self.assign_many_indices(array))

    def assign(self, width: int, height: int) -> Bucket:
        """The bucket of one image. `ValueError` with the reason if it has none."""
        return place_one(self, width, height)

    def assign_many_indices(self, sizes: Any) -> IntArray:
        """[N] int32 positions in `bucket_set`; -1 for none."""
        array = as_sizes(sizes)
        index = np.full(len(array), -1, dtype=np.int32)
        readable = array.min(axis=1, initial=1) > 0
        index[readable] = self._nearest(array[readable, 0], array[readable, 1])
        return index


class DataTrainer(ABC):
    """A trainer whose buckets follow from the images; `_sizes` decides."""

    @property
    def bucket_set(self) -> BucketSet | None:
        """None: the images themselves decide."""
        return None

    @abstractmethod
    def _sizes(self, width: FloatArray, height: FloatArray) -> tuple[Any, Any]:
        """[N] readable widths and heights -> bucket widths and heights; 0 where the trainer has none."""

    def place(self, sizes: Any) -> Placement:
        """Place N images; rows with a side < 1 count as unreadable."""
        array = as_sizes(sizes)
        readable = array.min(axis=1, initial=1) > 0
        buckets, resized = np.zeros_like(array), np.zeros_like(array)
        width, height = (array[readable, side].astype(np.float64) for side in (0, 1))
        chosen = np.stack([np.asarray(s, dtype=np.int32) for s in self._sizes(width, height)], axis=1)
        buckets[readable] = chosen
        reasons: npt.NDArray[np.uint8] = np.where(readable, Reason.PLACED, Reason.UNREADABLE).astype(np.uint8)
        reasons[readable & (buckets.min(axis=1, initial=1) < 1)] = Reason.TOO_SMALL
        placed = reasons == Reason.PLACED
        (w, h), (bw, bh) = array[placed].T, buckets[placed].T
        resized[placed] = np.stack(geometry.cover_resize(w, h, w / h, bw, bh, bw / bh), axis=1)
        return place_from_data(array, buckets, resized, reasons)

    def assign(self, width: int, height: int) -> Bucket:
        """The bucket of one image. `ValueError` with the reason if it has none."""
        return place_one(self, width, height)

    def assign_many_indices(self, sizes: Any) -> IntArray:
        """[N] int32 positions in `place(sizes).bucket_set`; -1 for none."""
        return self.place(sizes).bucket_index
