"""What decides buckets: the protocol that every rule satisfies, and the class that this package's rules share."""

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

__all__ = [
    "BucketRule",
    "Decision",
    "InSet",
    "Outputs",
    "OwnSizes",
    "RuleBase",
    "SetRule",
    "check_rule",
    "place_from_data",
    "place_into_set",
    "place_one",
]


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
    """A rule by one method, `_decide`; the four of `BucketRule` follow from it."""

    _bucket_set: BucketSet | None = None

    @abstractmethod
    def _decide(self, sizes: IntArray) -> Decision:
        """What becomes of N images; `sizes` is [N, 2] int32, rows with a side below 1 are unreadable."""

    @property
    def bucket_set(self) -> BucketSet | None:
        """The rule's whole set; None where the images themselves decide (`place(sizes).bucket_set` is what occurs)."""
        return self._bucket_set

    def place(self, sizes: npt.ArrayLike) -> Placement:
        """Place N images. `sizes` is [N, 2] (width, height) in pixels; rows with a side < 1 count as unreadable."""
        return self._decide(as_sizes(sizes)).placement()

    def assign(self, width: int, height: int) -> Bucket:
        """The bucket of one image. `ValueError` with the reason if it has none."""
        return place_one(self, width, height)

    def assign_many_indices(self, sizes: npt.ArrayLike) -> IntArray:
        """[N] int32 positions in `bucket_set`, or where that is None in `place(sizes).bucket_set`; -1 for none."""
        return self._decide(as_sizes(sizes)).indices()


class SetRule(RuleBase):
    """A rule with a set of its own, whatever the images."""

    def __init__(self, bucket_set: BucketSet) -> None:
        self._bucket_set: BucketSet = bucket_set

    @property
    def bucket_set(self) -> BucketSet:
        return self._bucket_set


def check_rule(strategy: object) -> None:
    """Before headers are read: is this a rule at all?

    Raises:
        KohyaBucketError: it is a class, a bucket set, a name, or anything else that places no images.
    """
    if isinstance(strategy, type) or not callable(getattr(strategy, "place", None)):
        what = f"the class {strategy.__name__}" if isinstance(strategy, type) else repr(strategy)
        raise KohyaBucketError(
            f"strategy is {what}, but must be a rule, e.g. KohyaBuckets(1024), or FixedBuckets(bucket_set) for a set"
        )


def place_one(rule: BucketRule, width: int, height: int) -> Bucket:
    """Bucket of one image by the rule's own `place`: one code path for one image and for many."""
    placement = rule.place(as_sizes([(width, height)]))
    bucket = placement.bucket(0)
    if bucket is None:
        raise ValueError(f"an image of {width}x{height} has no bucket: {placement.reason(0).text}")
    return bucket


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


def place_into_set(
    sizes: IntArray,
    bucket_set: BucketSet,
    index: IntArray,
    reasons: npt.NDArray[np.uint8] | None = None,
) -> Placement:
    """Placement of images into a known set, scaled to cover their bucket.

    Args:
        sizes: [N, 2] int32 (width, height).
        index: [N] int32 position in `bucket_set`, -1 for none.
        reasons: [N] uint8 `Reason` values; if None, every image without a bucket counts as unreadable.
    """
    if reasons is None:
        reasons = np.where(index >= 0, Reason.PLACED, Reason.UNREADABLE).astype(np.uint8)
    bucket_sizes = np.empty((len(sizes), 2), dtype=np.int32)
    resized_sizes = np.empty((len(sizes), 2), dtype=np.int32)
    out = Outputs(len(sizes))
    # Columns of doubles, so that no loop over images converts or strides.
    bucket_widths, bucket_heights = (np.ascontiguousarray(side, dtype=np.float64) for side in bucket_set.sizes.T)

    def work(start: int, stop: int) -> None:
        at = index[start:stop]
        width, height = (sizes[start:stop, side].astype(np.float64) for side in (0, 1))
        missing = at < 0
        any_missing = bool(missing.any())
        if any_missing:
            at = np.where(missing, 0, at)
            width[missing] = height[missing] = 1
        bucket_width, bucket_height = bucket_widths[at], bucket_heights[at]
        bucket_aspect, aspect = bucket_set.aspects[at], width / height
        resized = geometry.cover_resize(width, height, aspect, bucket_width, bucket_height, bucket_aspect)
        bucket_sizes[start:stop, 0], bucket_sizes[start:stop, 1] = bucket_width, bucket_height
        resized_sizes[start:stop, 0], resized_sizes[start:stop, 1] = resized
        out.fill(start, stop, (bucket_width, bucket_height), bucket_aspect, aspect, resized)
        if any_missing:
            bucket_sizes[start:stop][missing] = 0
            resized_sizes[start:stop][missing] = 0
            out.clear(start, stop, missing)

    for_chunks(len(sizes), work)
    return out.placement(bucket_set, index, bucket_sizes, resized_sizes, reasons)


def place_from_data(
    sizes: IntArray, bucket_sizes: IntArray, resized_sizes: IntArray | None, reasons: npt.NDArray[np.uint8],
    unit: int = 1,
) -> Placement:  # fmt: skip
    """Placement where each image brings its bucket; the set is what occurs, sorted by (width, height).

    All arrays have N rows; rows whose reason is not `PLACED` lose their bucket. Without `resized_sizes` images are
    scaled until they cover it. Every bucket side is a multiple of `unit` (knowing it saves time, no more).
    """
    placed = reasons == Reason.PLACED
    bucket_set, index = distinct_sizes(bucket_sizes, placed, unit)
    out = Outputs(len(sizes))
    resized = np.empty_like(sizes) if resized_sizes is None else resized_sizes

    def work(start: int, stop: int) -> None:
        missing = ~placed[start:stop]
        any_missing = bool(missing.any())
        if resized_sizes is None:
            resized[start:stop] = geometry.covering_sizes(sizes[start:stop], bucket_sizes[start:stop])
        parts = sizes[start:stop], bucket_sizes[start:stop], resized[start:stop]
        columns = [part[:, side].astype(np.float64) for part in parts for side in (0, 1)]
        if any_missing:
            for column in columns:
                column[missing] = 1
        width, height, bucket_width, bucket_height, resized_width, resized_height = columns
        bucket = bucket_width, bucket_height
        out.fill(start, stop, bucket, bucket_width / bucket_height, width / height, (resized_width, resized_height))
        if any_missing:
            out.clear(start, stop, missing)

    for_chunks(len(sizes), work)
    if not placed.all():
        bucket_sizes = np.where(placed[:, None], bucket_sizes, 0).astype(np.int32)
        resized = np.where(placed[:, None], resized, 0).astype(np.int32)
    return out.placement(bucket_set, index, bucket_sizes, resized, reasons)


class Outputs:
    """Rows that every placement computes alike, allocated once and filled range by range."""

    def __init__(self, n: int) -> None:
        self.crop_ltrb = np.empty((n, 4), dtype=np.float64)
        self.aspect_errors = np.empty(n, dtype=np.float64)
        self.crop_loss = np.empty(n, dtype=np.float64)

    def fill(
        self, start: int, stop: int, bucket: tuple[FloatArray, FloatArray], bucket_aspect: FloatArray,
        aspect: FloatArray, resized: tuple[geometry.Sides, geometry.Sides],
    ) -> None:  # fmt: skip
        """Rows `start` to `stop`, from columns of widths and heights."""
        geometry.crop_ltrb(*bucket, bucket_aspect, aspect, out=self.crop_ltrb[start:stop])
        np.subtract(bucket_aspect, aspect, out=self.aspect_errors[start:stop])
        self.crop_loss[start:stop] = geometry.crop_loss(*bucket, *resized)

    def clear(self, start: int, stop: int, missing: npt.NDArray[np.bool_]) -> None:
        """Empty those of the rows that have no bucket."""
        self.crop_ltrb[start:stop][missing] = 0
        self.aspect_errors[start:stop][missing] = np.nan
        self.crop_loss[start:stop][missing] = np.nan

    def placement(
        self, bucket_set: BucketSet | None, index: IntArray, bucket_sizes: IntArray, resized_sizes: IntArray,
        reasons: npt.NDArray[np.uint8],
    ) -> Placement:  # fmt: skip
        """Together with what is decided."""
        computed = self.crop_ltrb, self.aspect_errors, self.crop_loss
        return Placement(bucket_set, index, bucket_sizes, resized_sizes, *computed, reasons)
