"""The values that every rule shares: `Bucket`, `BucketSet`, `Placement` and the `BucketRule` protocol."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import BucketSettingsError, InvalidBucketError, KohyaBucketError

__all__ = [
    "Bucket",
    "BucketRule",
    "BucketSet",
    "FloatArray",
    "IntArray",
    "Placement",
    "Reason",
    "as_pair",
    "as_resolution",
    "as_sizes",
    "as_whole",
    "check_rule",
]

IntArray = npt.NDArray[np.int32]
_MAX = 2**31 - 1
# Generated sets grow with the sides; this is far above what any model trains.
_MAX_RESOLUTION = 1_000_000
FloatArray = npt.NDArray[np.float64]


def as_pair(row: Any) -> tuple[int, int]:
    """A size or an offset, whatever holds its two numbers, as a tuple of plain ones."""
    return int(row[0]), int(row[1])


@dataclass(frozen=True, order=True)
class Bucket:
    """A target size in pixels: `(width, height)`. Unpacks like a tuple.

    Raises:
        InvalidBucketError: a side is not a positive integer.
    """

    width: int
    height: int

    def __post_init__(self) -> None:
        if type(self.width) is int and type(self.height) is int and 0 < self.width <= _MAX and 0 < self.height <= _MAX:
            return
        for side, value in (("width", self.width), ("height", self.height)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise InvalidBucketError(f"bucket {self.width!r}x{self.height!r}: {side} must be an integer")
            if value <= 0:
                raise InvalidBucketError(f"bucket {self.width}x{self.height}: {side} is {value}, but must be 1 or more")
            if value > _MAX:
                raise InvalidBucketError(f"bucket {self.width}x{self.height}: {side} does not fit into 32 bits")
            object.__setattr__(self, side, int(value))

    def __iter__(self) -> Iterator[int]:
        yield self.width
        yield self.height

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"

    @property
    def aspect_ratio(self) -> float:
        """Width divided by height: above 1 is landscape."""
        return self.width / self.height

    @property
    def log_aspect_ratio(self) -> float:
        """Natural logarithm of the aspect: symmetric around 0 for portrait and landscape."""
        return math.log(self.width / self.height)

    @property
    def pixel_count(self) -> int:
        return self.width * self.height

    def as_tuple(self) -> tuple[int, int]:
        return (self.width, self.height)

    def is_multiple_of(self, factor: int) -> bool:
        return self.width % factor == 0 and self.height % factor == 0


@dataclass(frozen=True)
class BucketSet:
    """An ordered, duplicate-free list of buckets. The order decides ties.

    Args:
        buckets: one or more `Bucket`s.
        name: a label for tables, e.g. the preset's name.
        description: one line on where the set comes from.
        vae_factor: every side of every bucket must be a multiple of it (1: no demand).

    Raises:
        InvalidBucketError: the set is empty, holds a bucket twice, or one that is not a multiple.
    """

    buckets: tuple[Bucket, ...]
    name: str = ""
    description: str = ""
    vae_factor: int = field(default=1)

    def __post_init__(self) -> None:
        label = f"bucket set {self.name!r}" if self.name else "bucket set"
        object.__setattr__(self, "buckets", tuple(self.buckets))
        if not self.buckets:
            raise InvalidBucketError(f"{label} is empty: it needs at least one bucket")
        if self.vae_factor < 1:
            raise InvalidBucketError(f"{label}: vae_factor is {self.vae_factor}, but must be 1 or more")
        seen: set[Bucket] = set()
        for bucket in self.buckets:
            if bucket in seen:
                raise InvalidBucketError(f"{label} holds {bucket} twice: remove one of the two")
            seen.add(bucket)
            if not bucket.is_multiple_of(self.vae_factor):
                raise InvalidBucketError(f"{label}: {bucket} is not a multiple of {self.vae_factor} in both sides")

    @classmethod
    def from_dims(
        cls,
        dims: Iterable[Iterable[int]],
        *,
        name: str = "",
        description: str = "",
        vae_factor: int = 1,
    ) -> BucketSet:
        """Build a set from `(width, height)` pairs, e.g. a list of tuples or a [K, 2] array."""
        buckets = []
        for pair in dims:
            sides = tuple(pair)
            if len(sides) != 2:
                raise InvalidBucketError(f"bucket {sides!r} must have two sides, width and height")
            buckets.append(Bucket(*sides))
        return cls(tuple(buckets), name, description, vae_factor)

    @cached_property
    def sizes(self) -> IntArray:
        """[K, 2] int32: width, height of each bucket, in set order."""
        out = np.array([b.as_tuple() for b in self.buckets], dtype=np.int32)
        out.setflags(write=False)
        return out

    @cached_property
    def aspects(self) -> FloatArray:
        """[K] float64: width / height of each bucket, in set order."""
        out = self.sizes[:, 0] / self.sizes[:, 1]
        out.setflags(write=False)
        return out

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __getitem__(self, index: int) -> Bucket:
        return self.buckets[index]

    def __contains__(self, bucket: object) -> bool:
        return bucket in self.buckets

    def index_of(self, bucket: Bucket) -> int:
        """Position of `bucket` in the set; `ValueError` if it is not in it."""
        return self.buckets.index(bucket)

    def sorted_by_aspect_ratio(self) -> tuple[Bucket, ...]:
        return tuple(sorted(self.buckets, key=lambda b: b.aspect_ratio))


class Reason(enum.IntEnum):
    """Why an image has no bucket. `PLACED` (0) means that it has one."""

    PLACED = 0
    UNREADABLE = 1
    TOO_SMALL = 2
    ASPECT_ERROR = 3
    CROP_LIMIT = 4
    NOT_A_MULTIPLE = 5
    UNDERFILLED = 6
    NO_SMALLER_BUCKET = 7
    SIDE_LIMIT = 8

    @property
    def text(self) -> str:
        return _REASON_TEXT[self]


_REASON_TEXT = {
    Reason.PLACED: "placed",
    Reason.UNREADABLE: "its size could not be read (broken, empty or not an image)",
    Reason.TOO_SMALL: "a side is shorter than one bucket step after resizing, so its bucket would have side 0",
    Reason.ASPECT_ERROR: "its aspect is further from every bucket than the limit allows",
    Reason.CROP_LIMIT: "every bucket would crop off more than the limit allows",
    Reason.NOT_A_MULTIPLE: "its size is no multiple of the step, and resizing is off",
    Reason.UNDERFILLED: "its bucket holds fewer images than a batch, and such buckets are dropped",
    Reason.NO_SMALLER_BUCKET: "every bucket of the set is larger than it, and enlarging is off",
    Reason.SIDE_LIMIT: "a side is outside the limits, and resizing or enlarging is off",
}


@dataclass(frozen=True)
class Placement:
    """What a rule decides for N images, as arrays with one row per image.

    Attributes:
        bucket_set: the buckets that `bucket_index` counts in. For rules whose buckets come from the data
            (Kohya's no-upscale mode, exact sizes) these are the sizes that occur, sorted; otherwise the
            rule's whole set.
        bucket_index: [N] int32, position in `bucket_set`; -1 without a bucket.
        bucket_sizes: [N, 2] int32 pixels (width, height); 0 without a bucket.
        resized_sizes: [N, 2] int32 pixels the image is scaled to before the centre crop; 0 without a bucket.
        crop_ltrb: [N, 4] float64, the crop box that sd-scripts hands to SDXL as conditioning (computed
            from the bucket and the original size, not from the crop that is done); 0 without a bucket.
        aspect_errors: [N] float64, bucket aspect - image aspect; NaN without a bucket.
        crop_loss: [N] float64, share of the resized image's pixels that is cropped off; NaN without a bucket.
        reasons: [N] uint8 values of `Reason`.
    """

    bucket_set: BucketSet | None
    bucket_index: IntArray
    bucket_sizes: IntArray
    resized_sizes: IntArray
    crop_ltrb: FloatArray
    aspect_errors: FloatArray
    crop_loss: FloatArray
    reasons: npt.NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.bucket_index)

    @property
    def placed(self) -> npt.NDArray[np.bool_]:
        """[N] bool: the image has a bucket."""
        return self.bucket_index >= 0

    def select(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Placement:
        """The placement of some of the images, by mask or by positions; the bucket set stays."""
        return Placement(
            self.bucket_set,
            self.bucket_index[rows],
            self.bucket_sizes[rows],
            self.resized_sizes[rows],
            self.crop_ltrb[rows],
            self.aspect_errors[rows],
            self.crop_loss[rows],
            self.reasons[rows],
        )

    def bucket(self, i: int) -> Bucket | None:
        """Bucket of image `i`, or None."""
        k = int(self.bucket_index[i])
        return None if k < 0 or self.bucket_set is None else self.bucket_set[k]

    def reason(self, i: int) -> Reason:
        """Why image `i` has no bucket (`Reason.PLACED` if it has one)."""
        return Reason(int(self.reasons[i]))


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


def as_whole(name: str, value: Any) -> int:
    """A setting in pixels as a plain int, whatever number type it has.

    Raises:
        BucketSettingsError: a fraction, a text, None.
    """
    try:
        if not isinstance(value, str) and int(value) == value:
            return int(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise BucketSettingsError(f"{name} is {value!r}, but must be a whole number")


def as_resolution(name: str, value: Any) -> tuple[int, int]:
    """(width, height) from one side or two.

    Raises:
        BucketSettingsError: neither one whole number nor two, or a side beyond all reason.
    """
    try:
        width, height = value if np.ndim(value) else (value, value)
        sides = as_whole(name, width), as_whole(name, height)
    except (TypeError, ValueError):
        raise BucketSettingsError(
            f"{name} is {value!r}, but must be a whole number of pixels or two of them, (width, height)"
        ) from None
    if max(sides) > _MAX_RESOLUTION:
        raise BucketSettingsError(
            f"{name} is {sides[0]}x{sides[1]}, but no side can be above {_MAX_RESOLUTION:,} pixels; 1024 is usual"
        )
    return sides


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


def as_sizes(sizes: Any) -> IntArray:
    """Turn pairs, lists or arrays into a [N, 2] int32 array of (width, height).

    Raises:
        KohyaBucketError: another shape, fractions, or sides beyond 2**31 - 1.
    """
    array = np.asarray(sizes)
    if array.size == 0:
        return np.zeros((0, 2), dtype=np.int32)
    if array.ndim != 2 or array.shape[1] != 2:
        raise KohyaBucketError(f"sizes must have shape [N, 2] (width, height), got {list(array.shape)}")
    if array.dtype == np.int32:
        return array
    if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and not np.all(array == np.trunc(array))):
        raise KohyaBucketError(f"sizes must be whole numbers of pixels that fit into 32 bits, got dtype {array.dtype}")
    if array.max() > np.iinfo(np.int32).max or array.min() < np.iinfo(np.int32).min:
        raise KohyaBucketError("sizes must fit into 32 bits: a side is longer than 2147483647 pixels")
    return array.astype(np.int32)
