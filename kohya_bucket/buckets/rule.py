"""What a rule is: the protocol that every rule satisfies, its one method, and the placement it makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays import distinct_sizes, for_chunks
from kohya_bucket.buckets.bucket import Bucket, BucketSet
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.sizes import FloatArray, IntArray, as_sizes
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
        return place_one(self, width, height)

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
    """Refuse anything that is not a rule, before image headers are read.

    Raises:
        KohyaBucketError: it is a class, a bucket set, a name, or anything else that places no images.
    """
    if isinstance(rule, type) or not callable(getattr(rule, "place", None)):
        what = f"the class {rule.__name__}" if isinstance(rule, type) else repr(rule)
        raise KohyaBucketError(
            f"rule is {what}, but must be a rule, e.g. KohyaBuckets(1024), or FixedBuckets(bucket_set) for a set"
        )


def place_one(rule: BucketRule, width: int, height: int) -> Bucket:
    """Bucket of one image by the rule's own `place`: one code path for one image and for many."""
    placement = rule.place(as_sizes([(width, height)]))
    bucket = placement.bucket(0)
    if bucket is None:
        raise ValueError(f"an image of {width}x{height} has no bucket: {placement.reason(0).text}")
    return bucket


class Assignment(Protocol):
    """The buckets that a rule gives N images. Neither answer costs anything until it is asked for."""

    def indices(self) -> IntArray:
        """[N] int32 positions in `placement().bucket_set`; -1 for none."""

    def placement(self) -> Placement:
        """The whole placement."""


@dataclass(frozen=True)
class InSet:
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

    def indices(self) -> IntArray:
        long = geometry.too_long(self.sizes, self.bucket_set.sizes, self.index)
        return self.index if long is None else np.where(long, np.int32(-1), self.index)

    def placement(self) -> Placement:
        index, rows = self.indices(), PlacementRows(len(self.sizes))
        # Columns of doubles, so that no loop over images converts or strides.
        widths, heights = (np.ascontiguousarray(side, dtype=np.float64) for side in self.bucket_set.sizes.T)
        aspects = self.bucket_set.aspects

        def work(start: int, stop: int) -> None:
            at = index[start:stop]
            width, height = (self.sizes[start:stop, side].astype(np.float64) for side in (0, 1))
            missing = at < 0
            if missing.any():
                at = np.where(missing, 0, at)
                width[missing] = height[missing] = 1
            aspect, bucket, bucket_aspect = width / height, (widths[at], heights[at]), aspects[at]
            resized = geometry.cover_resize(width, height, aspect, *bucket, bucket_aspect)
            rows.fill(start, stop, aspect, bucket, bucket_aspect, resized, missing)

        for_chunks(len(index), work)
        return rows.placement(self.bucket_set, index, self._reasons(index))

    def _reasons(self, index: IntArray) -> Reasons:
        reasons = self.reasons
        if reasons is None:
            reasons = np.where(self.index >= 0, Reason.PLACED, Reason.UNREADABLE).astype(np.uint8)
        return reasons if index is self.index else np.where(index == self.index, reasons, np.uint8(Reason.TOO_LONG))


@dataclass(frozen=True)
class OwnSizes:
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
        return distinct_sizes(self.bucket_sizes, self._reasons() == Reason.PLACED, self.unit)[1]

    def placement(self) -> Placement:
        reasons, given = self._reasons(), self.resized_sizes
        placed = reasons == Reason.PLACED
        bucket_set, index = distinct_sizes(self.bucket_sizes, placed, self.unit)
        rows = PlacementRows(len(index), self.bucket_sizes, given)

        def work(start: int, stop: int) -> None:
            missing, parts = ~placed[start:stop], (self.sizes, self.bucket_sizes, *(() if given is None else (given,)))
            columns = [part[start:stop, side].astype(np.float64) for part in parts for side in (0, 1)]
            if missing.any():
                for column in columns:
                    column[missing] = 1
            width, height, bucket_width, bucket_height, *resized = columns
            aspect, bucket_aspect = width / height, bucket_width / bucket_height
            if not resized:
                resized = [*geometry.cover_resize(width, height, aspect, bucket_width, bucket_height, bucket_aspect)]
            bucket = bucket_width, bucket_height
            rows.fill(start, stop, aspect, bucket, bucket_aspect, (resized[0], resized[1]), missing)

        for_chunks(len(index), work)
        return rows.placement(bucket_set, index, reasons)

    def _reasons(self) -> Reasons:
        long = None if self.resized_sizes is not None else geometry.too_long(self.sizes, self.bucket_sizes)
        if long is None:
            return self.reasons
        return np.where(long & (self.reasons == Reason.PLACED), np.uint8(Reason.TOO_LONG), self.reasons)


class PlacementRows:
    """The arrays of a placement, allocated once and filled range by range."""

    def __init__(self, n: int, bucket_sizes: IntArray | None = None, resized_sizes: IntArray | None = None) -> None:
        self.bucket_sizes = np.empty((n, 2), dtype=np.int32) if bucket_sizes is None else bucket_sizes
        self.resized_sizes = np.empty((n, 2), dtype=np.int32) if resized_sizes is None else resized_sizes
        self._crop_ltrb = np.empty((n, 4), dtype=np.float64)
        self._aspect_errors, self._crop_loss = np.empty(n, dtype=np.float64), np.empty(n, dtype=np.float64)

    def fill(
        self, start: int, stop: int, aspect: FloatArray, bucket: tuple[FloatArray, FloatArray],
        bucket_aspect: FloatArray, resized: tuple[geometry.Sides, geometry.Sides], missing: npt.NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Rows `start` to `stop`, from columns of widths and heights; those of `missing` are emptied."""
        rows = slice(start, stop)
        for side in (0, 1):
            self.bucket_sizes[rows, side], self.resized_sizes[rows, side] = bucket[side], resized[side]
        geometry.crop_ltrb(*bucket, bucket_aspect, aspect, out=self._crop_ltrb[rows])
        np.subtract(bucket_aspect, aspect, out=self._aspect_errors[rows])
        self._crop_loss[rows] = geometry.crop_loss(*bucket, *resized)
        if missing.any():
            self.bucket_sizes[rows][missing] = self.resized_sizes[rows][missing] = self._crop_ltrb[rows][missing] = 0
            self._aspect_errors[rows][missing] = self._crop_loss[rows][missing] = np.nan

    def placement(self, bucket_set: BucketSet | None, index: IntArray, reasons: Reasons) -> Placement:
        sizes, computed = (self.bucket_sizes, self.resized_sizes), (self._aspect_errors, self._crop_loss)
        return Placement(bucket_set, index, *sizes, self._crop_ltrb, *computed, reasons)
