"""What a rule decides for N images: enough for their positions in the bucket set, and for the whole placement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays.build_placement import place_from_data, place_into_set
from kohya_bucket.buckets.arrays.distinct_sizes import distinct_sizes
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.sizes import IntArray

__all__ = ["Decision", "InSet", "OwnSizes"]


Reasons = npt.NDArray[np.uint8]


class Decision(Protocol):
    """Neither answer costs anything until it is asked for."""

    def indices(self) -> IntArray:
        """[N] int32 positions in `placement().bucket_set`; -1 for none."""

    def placement(self) -> Placement:
        """All of it."""


@dataclass(frozen=True)
class InSet:
    """Each image goes into a known set.

    Attributes:
        sizes: [N, 2] int32 (width, height) of the images.
        index: [N] int32 position in `bucket_set`, -1 for none.
        reasons: [N] uint8 values of `Reason`; None where an image without a bucket can only be unreadable.
    """

    sizes: IntArray
    bucket_set: BucketSet
    index: IntArray
    reasons: Reasons | None = None

    def indices(self) -> IntArray:
        return self._decided()[0]

    def placement(self) -> Placement:
        return place_into_set(self.sizes, self.bucket_set, *self._decided())

    def _decided(self) -> tuple[IntArray, Reasons | None]:
        long = geometry.too_long(self.sizes, self.bucket_set.sizes, self.index)
        if long is None:
            return self.index, self.reasons
        reasons = np.where(self.index >= 0, Reason.PLACED, Reason.UNREADABLE) if self.reasons is None else self.reasons
        return np.where(long, np.int32(-1), self.index), np.where(long, Reason.TOO_LONG, reasons).astype(np.uint8)


@dataclass(frozen=True)
class OwnSizes:
    """Each image brings its bucket, and the set is what occurs.

    Attributes:
        sizes: [N, 2] int32 (width, height) of the images.
        bucket_sizes: [N, 2] int32; no matter where `reasons` is not `PLACED`.
        reasons: [N] uint8 values of `Reason`.
        unit: every bucket side is a multiple of it (knowing it saves time, no more).
        resized_sizes: [N, 2] int32 to which the images are scaled; None is until they cover their bucket.
    """

    sizes: IntArray
    bucket_sizes: IntArray
    reasons: Reasons
    unit: int = 1
    resized_sizes: IntArray | None = None

    def indices(self) -> IntArray:
        return distinct_sizes(self.bucket_sizes, self._reasons() == Reason.PLACED, self.unit)[1]

    def placement(self) -> Placement:
        return place_from_data(self.sizes, self.bucket_sizes, self.resized_sizes, self._reasons(), self.unit)

    def _reasons(self) -> Reasons:
        long = None if self.resized_sizes is not None else geometry.too_long(self.sizes, self.bucket_sizes)
        if long is None:
            return self.reasons
        return np.where(long & (self.reasons == Reason.PLACED), np.uint8(Reason.TOO_LONG), self.reasons)
