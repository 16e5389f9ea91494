"""What a rule is: the protocol that every rule satisfies, its one method, and the placement it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays import for_chunks
from kohya_bucket.buckets.bucket import Bucket, BucketSet, distinct_sizes
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.sizes import IntArray, as_sizes
from kohya_bucket.errors import KohyaBucketError

Reasons = npt.NDArray[np.uint8]


@runtime_checkable
class BucketRule(Protocol):
    """What decides buckets. Every rule class (suffix `Buckets`) has these four."""

    @property
    def bucket_set(self) -> BucketSet | None:
        """The rule's whole set; None where the buckets follow from the images."""

    def place(self, sizes: Any) -> Placement:
        """Place N images; `sizes` is [N, 2] (width, height)."""

    def assign(self, width: int, height: int) -> Bucket:
        """Bucket of one image."""

    def assign_many_indices(self, sizes: Any) -> npt.NDArray[np.intp] | IntArray:
        """[N] bucket indices, -1 where an image has no bucket."""


class RuleBase(ABC):
    """A rule by one method, `_assign`; the four of `BucketRule` follow from it."""

    _bucket_set: BucketSet | None = None

    @abstractmethod
    def _assign(self, sizes: IntArray) -> Assignment:
        """The buckets of N images; `sizes` is [N, 2] int32, rows with a side below 1 are unreadable."""

    @property
    def bucket_set(self) -> BucketSet | None:
        """The rule's whole set; None where the images themselves decide (`place(sizes).bucket_set` is what occurs)."""
        return self._bucket_set

    def place(self, sizes: npt.ArrayLike) -> Placement:
        """Place N images. `sizes` is [N, 2] (width, height) in pixels; rows with a side < 1 count as unreadable."""
        return self._assign(as_sizes(sizes)).placement()

    def assign(self, width: int, height: int) -> Bucket:
        """The bucket of one image. `ValueError` with the reason if it has none."""
        placement = self.place([(width, height)])
        bucket = placement.bucket(0)
        if bucket is None:
            raise ValueError(f"an image of {width}x{height} has no bucket: {placement.reason(0).text}")
        return bucket

    def assign_many_indices(self, sizes: npt.ArrayLike) -> IntArray:
        """[N] int32 positions in `bucket_set`, or where that is None in `place(sizes).bucket_set`; -1 for none."""
        return self._assign(as_sizes(sizes)).indices()


class SetRule(RuleBase):
    """A rule with a set of its own, whatever the images."""

    def __init__(self, bucket_set: BucketSet) -> None:
        self._bucket_set: BucketSet = bucket_set

    @property
    def bucket_set(self) -> BucketSet:
        return self._bucket_set


def check_rule(rule: object) -> None:
    """Raises `KohyaBucketError`, before image headers are read, for a class, a bucket set, a name, or anything else
    that places no images."""
    if isinstance(rule, type) or not callable(getattr(rule, "place", None)):
        what = f"the class {rule.__name__}" if isinstance(rule, type) else repr(rule)
        raise KohyaBucketError(
            f"rule is {what}, but must be a rule, e.g. KohyaBuckets(1024), or FixedBuckets(bucket_set) for a set"
        )


class Assignment(ABC):
    """The buckets that a rule gives N images. Neither answer costs anything until it is asked for."""

    sizes: IntArray
    bucket_sizes: IntArray | None
    resized_sizes: IntArray | None

    @abstractmethod
    def indices(self) -> IntArray:
        """[N] int32 positions in `placement().bucket_set`; -1 for none."""

    @abstractmethod
    def _decided(self) -> tuple[BucketSet | None, IntArray, Reasons]:
        """The set, the indices, and the reasons."""

    def placement(self) -> Placement:
        """The whole placement."""
        bucket_set, index, reasons = self._decided()
        n, own = len(index), (self.bucket_sizes, self.resized_sizes)
        # Sizes of the assignment's own become the placement's: only rows without a bucket change, to 0.
        bucket_sizes, resized_sizes = (np.empty((n, 2), dtype=np.int32) if part is None else part for part in own)
        ltrb, errors, loss = np.empty((n, 4)), np.empty(n), np.empty(n)
        # Columns of doubles, so that no loop over images converts or strides.
        of_set = [] if bucket_set is None else [side.astype(np.float64) for side in bucket_set.sizes.T]

        def work(start: int, stop: int) -> None:
            rows = slice(start, stop)
            # The sides of the images, of their buckets, and of the resized images where an own bucket brings them.
            read = [part for part in (self.sizes, *own) if part is not None]
            columns = [part[rows, side].astype(np.float64) for part in read for side in (0, 1)]
            if self.bucket_sizes is None:
                columns += [side[index[rows]] for side in of_set]
            # An image without a bucket is computed with sides of 1, so that nothing is divided by 0, and blanked last.
            missing = index[rows] < 0
            if missing.any():
                for column in columns:
                    column[missing] = 1
            width, height, bucket_width, bucket_height, *resized = columns
            bucket, aspect, bucket_aspect = (bucket_width, bucket_height), width / height, bucket_width / bucket_height
            new_width, new_height = resized or geometry.cover_resize(width, height, aspect, *bucket, bucket_aspect)
            for out, sides in ((bucket_sizes, bucket), (resized_sizes, (new_width, new_height))):
                out[rows, 0], out[rows, 1] = sides
            ltrb[rows] = geometry.crop_ltrb(*bucket, bucket_aspect, aspect)
            errors[rows] = bucket_aspect - aspect
            loss[rows] = geometry.crop_loss(*bucket, new_width, new_height)
            if missing.any():
                bucket_sizes[rows][missing] = resized_sizes[rows][missing] = ltrb[rows][missing] = 0
                errors[rows][missing] = loss[rows][missing] = np.nan

        for_chunks(n, work)
        return Placement(bucket_set, index, bucket_sizes, resized_sizes, ltrb, errors, loss, reasons)


@dataclass(frozen=True)
class InSet(Assignment):
    """An assignment to a known set; images are scaled to cover their bucket.

    Attributes:
        sizes: [N, 2] int32 (width, height) of the images.
        index: [N] int32 position in `bucket_set`, -1 for none.
        reasons: [N] uint8 values of `Reason`; None where an image without a bucket can only be unreadable.
    """

    sizes: IntArray
    bucket_set: BucketSet
    index: IntArray
    reasons: Reasons | None = None
    bucket_sizes = resized_sizes = None

    def indices(self) -> IntArray:
        long = geometry.too_long(self.sizes, self.bucket_set.sizes, self.index)
        return self.index if long is None else np.where(long, np.int32(-1), self.index)

    def _decided(self) -> tuple[BucketSet, IntArray, Reasons]:
        index = self.indices()
        reasons = reasons_of(self.index) if self.reasons is None else self.reasons
        if index is not self.index:
            reasons = np.where(index == self.index, reasons, np.uint8(Reason.TOO_LONG))
        return self.bucket_set, index, reasons


@dataclass(frozen=True)
class OwnSizes(Assignment):
    """An assignment in which each image brings its bucket, and the set is what occurs, sorted by (width, height).

    Attributes:
        sizes: [N, 2] int32 (width, height) of the images.
        bucket_sizes: [N, 2] int32; ignored where `reasons` is not `PLACED`.
        reasons: [N] uint8 values of `Reason`.
        unit: every bucket side is a multiple of it; knowing it only saves time.
        resized_sizes: [N, 2] int32 to which the images are scaled; None: until they cover their bucket.
    """

    sizes: IntArray
    bucket_sizes: IntArray
    reasons: Reasons
    unit: int = 1
    resized_sizes: IntArray | None = None

    def indices(self) -> IntArray:
        return self._decided()[1]

    def _decided(self) -> tuple[BucketSet | None, IntArray, Reasons]:
        reasons = self.reasons
        long = None if self.resized_sizes is not None else geometry.too_long(self.sizes, self.bucket_sizes)
        if long is not None:
            reasons = np.where(long & (reasons == Reason.PLACED), np.uint8(Reason.TOO_LONG), reasons)
        return *distinct_sizes(self.bucket_sizes, reasons == Reason.PLACED, self.unit), reasons


def reasons_of(index: IntArray) -> Reasons:
    """[N] `Reason`s where an image without a bucket can only be unreadable."""
    reasons: Reasons = np.where(index >= 0, np.uint8(Reason.PLACED), np.uint8(Reason.UNREADABLE))
    return reasons
