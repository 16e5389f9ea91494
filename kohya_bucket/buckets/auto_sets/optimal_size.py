"""The optimal size of an image for an area: both sides rounded to the step, in whole numbers only."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray

__all__ = ["optimal_sizes"]

Ints = npt.NDArray[np.int64]


def optimal_sizes(
    sizes: IntArray, max_area: int, divisor: int, no_upscale: bool = False,
    min_side: int = 1, max_side: int | None = None,
) -> IntArray:  # fmt: skip
    """[N, 2] positive sizes -> [N, 2] int32 multiples of `divisor`; 0 where a side rounds to nothing.

    With scale = sqrt(max_area / (w * h)), each side is `round(side * scale / divisor) * divisor`; if the area then
    exceeds `max_area`, both are floored instead. `side * scale / divisor` is the root of the fraction
    `max_area * side / (other side * divisor**2)`, so integer roots decide, and half rounds to even as in Python.
    A side outside the limits moves to the limit, and the other one into the area that is left.
    """
    width, height = sizes[:, 0].astype(np.int64), sizes[:, 1].astype(np.int64)
    unit_area = divisor * divisor
    (rounded_w, floored_w), (rounded_h, floored_h) = (
        _root_of_fraction(max_area * side, other * unit_area) for side, other in ((width, height), (height, width))
    )
    over = rounded_w * rounded_h * unit_area > max_area
    units_w, units_h = np.where(over, floored_w, rounded_w), np.where(over, floored_h, rounded_h)
    if no_upscale:
        small = width * height <= max_area
        units_w = np.where(small, width // divisor, np.minimum(units_w, width // divisor))
        units_h = np.where(small, height // divisor, np.minimum(units_h, height // divisor))
    vanished = np.minimum(units_w, units_h) < 1
    low = max(min_side // divisor, 1)
    high = max_area // unit_area if max_side is None else max_side // divisor
    if low > 1 or high * low < max_area // unit_area:
        units_w, units_h = _within_limits(units_w, units_h, low, high, max_area // unit_area)
    out = np.empty((len(sizes), 2), dtype=np.int32)
    np.multiply(units_w, divisor, out=out[:, 0], casting="unsafe")
    np.multiply(units_h, divisor, out=out[:, 1], casting="unsafe")
    if no_upscale:
        vanished |= (out[:, 0] > sizes[:, 0]) | (out[:, 1] > sizes[:, 1])
    out[vanished] = 0
    return out


def _within_limits(units_w: Ints, units_h: Ints, low: int, high: int, most: int) -> tuple[Ints, Ints]:
    """Both sides moved to the limits, and the longer one into the `most` units of area that are left."""
    units_w, units_h = np.clip(units_w, low, high), np.clip(units_h, low, high)
    wide = units_w > units_h
    return (
        np.where(wide, np.minimum(units_w, most // units_h), units_w),
        np.where(wide, units_h, np.minimum(units_h, most // units_w)),
    )


def _root_of_fraction(numerator: Ints, denominator: Ints) -> tuple[Ints, Ints]:
    """`sqrt(numerator / denominator)`, rounded to the nearest whole number (half to even) and rounded down.

    The float root is off by less than a part in 10**15. Where a whole or a half number lies that near, whole
    numbers are compared instead; everywhere else the float cannot be on the wrong side of one.
    """
    doubled = 2 * np.sqrt(numerator / denominator)
    near = np.rint(doubled)
    doubt = np.flatnonzero(np.abs(doubled - near) <= 1e-9 * (near + 1))
    rounded, floored = (doubled * 0.5 + 0.5).astype(np.int64), (doubled * 0.5).astype(np.int64)
    if len(doubt):
        rounded[doubt], floored[doubt] = _exact_root(numerator[doubt], denominator[doubt])
    return rounded, floored


def _exact_root(numerator: Ints, denominator: Ints) -> tuple[Ints, Ints]:
    doubled = _integer_root(4 * numerator // denominator)  # floor(2 * root)
    rounded = (doubled + 1) // 2
    exact_half = (doubled % 2 == 1) & (doubled * doubled * denominator == 4 * numerator)
    rounded -= exact_half & (rounded % 2 == 1)
    return rounded, doubled // 2


def _integer_root(n: Ints) -> Ints:
    """floor(sqrt(n)) for 0 <= n < 2**62: the float root is off by at most one."""
    root = np.sqrt(n.astype(np.float64)).astype(np.int64)
    root -= root * root > n
    root += (root + 1) * (root + 1) <= n
    return np.asarray(root)
