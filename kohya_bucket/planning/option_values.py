"""What single options of a plan may be."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import array_of
from kohya_bucket.errors import PlanError

__all__ = ["COST", "as_same_shape", "as_share", "as_token_cost", "as_tokens", "positive"]

COST = "cost"
"""Of `same_shape`."""


def as_tokens(value: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """[K] tokens of one image of each bucket.

    Raises:
        PlanError: other than whole numbers, 1 or more.
    """
    given = array_of("bucket_tokens", value)
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
    except (TypeError, ValueError, OverflowError):
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


def as_same_shape(value: object) -> bool | str:
    """True, or "cost".

    Raises:
        PlanError: anything else.
    """
    if value is True or value == COST:
        return True if value is True else COST
    raise PlanError(
        f"same_shape is {value!r}, but must be True or {COST!r}: for batches of its own on each rank, plan with "
        "world_size=1 and deal the steps out"
    )


def as_share(name: str, value: object) -> float:
    """A share of an image.

    Raises:
        PlanError: it is not from 0 to 1.
    """
    try:
        share = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share <= 1:
        raise PlanError(f"{name} is {value!r}, but is a share of the image: from 0 to 1, e.g. 0.25 for a quarter")
    return share
