"""A bucket, and an ordered set of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, total_ordering

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import FloatArray, IntArray, size_keys, sizes_of_keys
from kohya_bucket.errors import InvalidBucketError

_MAX = 2**31 - 1


@total_ordering
class Bucket:
    """A target size in pixels: `(width, height)`. Unpacks like a tuple, and never changes.

    Batches hold buckets: Lightning refuses a frozen dataclass there, and transformers makes tuples anew from one
    argument, so it is neither.

    Raises:
        InvalidBucketError: a side is not a positive integer.
    """

    __slots__ = ("_sides",)

    def __init__(self, width: int, height: int) -> None:
        for side, value in (("width", width), ("height", height)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise InvalidBucketError(f"{side} must be an integer", width=width, height=height)
            if value <= 0:
                raise InvalidBucketError(f"{side} is {value}, but must be 1 or more", width=width, height=height)
            if value > _MAX:
                raise InvalidBucketError(f"{side} does not fit into 32 bits", width=width, height=height)
        self._sides = int(width), int(height)

    @property
    def width(self) -> int:
        return self._sides[0]

    @property
    def height(self) -> int:
        return self._sides[1]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bucket) and self._sides == other._sides

    def __lt__(self, other: Bucket) -> bool:
        return self._sides < other._sides

    def __hash__(self) -> int:
        return hash(self._sides)

    def __repr__(self) -> str:
        return f"Bucket(width={self.width}, height={self.height})"

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
        return self._sides

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

    Examples:
        >>> buckets = BucketSet.from_dims([(1024, 1024), (1152, 896)], name="mine", vae_factor=64)
        >>> print(*buckets)
        1024x1024 1152x896
        >>> buckets.sizes.tolist()
        [[1024, 1024], [1152, 896]]
        >>> FixedBuckets(buckets).assign(4000, 3000)
        Bucket(width=1152, height=896)
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
                why = f"{label} holds {bucket} twice: remove one of the two"
                raise InvalidBucketError(why, duplicates=[bucket.as_tuple()])
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

    def pixel_budget(self) -> int:
        """Median area of the buckets in pixels, rounded down: what `generate_buckets(target=...)` squares."""
        return int(np.median(self.sizes.astype(np.int64).prod(axis=1)))

    def all_multiples_of(self, factor: int) -> bool:
        """Every side of every bucket is a multiple of `factor`, such as that of another VAE."""
        return all(bucket.is_multiple_of(factor) for bucket in self.buckets)

    def sorted_by_aspect_ratio(self) -> tuple[Bucket, ...]:
        return tuple(sorted(self.buckets, key=lambda b: b.aspect_ratio))


_TABLE_CELLS = 1 << 22


def distinct_sizes(
    bucket_sizes: IntArray, placed: npt.NDArray[np.bool_], unit: int
) -> tuple[BucketSet | None, IntArray]:
    """The sizes that occur, sorted by (width, height), and each row's position among them; -1 where not `placed`.

    Every placed size is a multiple of `unit`; knowing it only saves time.
    """
    index = np.full(len(placed), -1, dtype=np.int32)
    if not placed.any():
        return None, index
    columns, rows = (int(side.max()) // unit + 1 for side in bucket_sizes.T)
    if columns * rows > _TABLE_CELLS + 4 * len(placed):
        keys, index[placed] = np.unique(size_keys(bucket_sizes)[placed], return_inverse=True)
        return BucketSet.from_dims(sizes_of_keys(keys).tolist()), index
    # A table over all sizes takes a fraction of the time of that sort. Its cell 0 stands for "no bucket".
    cells = (bucket_sizes[:, 0] // unit * rows + bucket_sizes[:, 1] // unit) * placed
    position = np.full(columns * rows, -1, dtype=np.int32)
    position[cells[placed]] = 0
    occur = np.flatnonzero(position == 0)
    position[occur] = np.arange(len(occur))
    return BucketSet.from_dims((np.stack([occur // rows, occur % rows], axis=1) * unit).tolist()), position[cells]
