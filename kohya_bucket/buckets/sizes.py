"""Sizes as arrays: [N, 2] int32 of (width, height), from whatever holds them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import pair_keys, pairs_of
from kohya_bucket.checks import array_of
from kohya_bucket.errors import BucketSettingsError, KohyaBucketError

Size = tuple[int, int]  # (width, height)
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]

# Generated sets grow with the sides; this is far above what any model trains.
_MAX_RESOLUTION = 1_000_000


def size_keys(sizes: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """[N] `pair_keys` of (width, height)."""
    return pair_keys(sizes[:, 0], sizes[:, 1])


def sizes_of_keys(keys: npt.NDArray[np.int64]) -> IntArray:
    """[N, 2] int32: the sizes that `size_keys` made numbers of."""
    return np.stack(pairs_of(keys), axis=1)


def as_pair(row: Any) -> tuple[int, int]:
    """A size or an offset, whatever holds its two numbers, as a tuple of plain ones."""
    return int(row[0]), int(row[1])


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


def positive(**values: float) -> None:
    """Refuse settings below 1, by name, with `BucketSettingsError`."""
    for name, value in values.items():
        if value < 1:
            raise BucketSettingsError(f"{name} is {value}, but must be 1 or more")


def check_steps(steps: int, name: str = "reso_steps") -> int:
    """The step; `BucketSettingsError` where it is below 1, so that no side can be a multiple of it."""
    if steps < 1:
        raise BucketSettingsError(f"{name} is {steps}, but must be 1 or more; 64 is usual")
    return steps


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


def longest_side(max_reso: tuple[int, int], reso_steps: int) -> int:
    """The longest side of buckets where none is set: twice the side of a square of that area, 1024 or more."""
    longest = max(1024, 2 * math.isqrt(max_reso[0] * max_reso[1]), *max_reso)
    return longest + -longest % max(reso_steps, 1)


def as_sizes(sizes: Any) -> IntArray:
    """Turn pairs, lists or arrays into a [N, 2] int32 array of (width, height).

    Raises:
        KohyaBucketError: another shape, fractions, or sides beyond 2**31 - 1.
    """
    array = array_of("sizes", sizes, KohyaBucketError)
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


def readable_sizes(dims: Any) -> IntArray:
    """`as_sizes` of images that could all be read: no side is below 1.

    Raises:
        KohyaBucketError: as `as_sizes`.
        BucketSettingsError: an image without a size.
    """
    sizes = as_sizes(dims)
    if sizes.min(initial=1) < 1:
        bad = sizes[sizes.min(axis=1) < 1][0]
        raise BucketSettingsError(
            f"dims holds an image of {bad[0]}x{bad[1]}: leave out what could not be read, e.g. by "
            "dims[dims.min(axis=1) > 0]"
        )
    return sizes
