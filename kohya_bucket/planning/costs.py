"""What an image or a clip costs a transformer: its tokens, each by itself, and each with every other.

A block of width d spends about 24 * d**2 operations on each of L tokens (projections and a feed-forward part of four
times the width) and 4 * d on each pair of them (attention). Up to a factor, that is L + L**2 / (6 * d).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import PlanError

__all__ = ["as_token_cost", "as_tokens", "cost_of", "positive"]


def cost_of(tokens: npt.ArrayLike, token_cost: tuple[float, float]) -> npt.NDArray[np.float64]:
    """[K] a * L + b * L**2 of [K] tokens L."""
    a, b = token_cost
    length = np.asarray(tokens, dtype=np.float64)
    return a * length + b * (length * length)


def as_tokens(value: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """[K] tokens of one image of each bucket.

    Raises:
        PlanError: other than whole numbers, 1 or more.
    """
    given = np.asarray(value)
    if given.ndim != 1 or (given.size and (given.dtype.kind not in "iu" or given.min() < 1 or given.max() >= 2**31)):
        raise PlanError(f"bucket_tokens is {value!r}, but must be [K] whole numbers, 1 or more")
    return given.astype(np.int64)


def as_token_cost(value: object) -> tuple[float, float]:
    """(a, b) of a * L + b * L**2.

    Raises:
        PlanError: other than two numbers, 0 or more and not both 0.
    """
    try:
        a, b = (float(v) for v in value)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        a = b = -1.0
    if not (0 <= a < math.inf and 0 <= b < math.inf and a + b > 0):
        raise PlanError(f"token_cost is {value!r}, but must be two numbers a, b, 0 or more and not both 0")
    return a, b


def positive(name: str, value: object) -> float:
    """A number above 0.

    Raises:
        PlanError: it is none.
    """
    number = -1.0 if isinstance(value, (str, bytes, bool)) else value
    try:
        number = float(number)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not 0 < number < math.inf:
        raise PlanError(f"{name} is {value!r}, but must be a number above 0")
    return number
