"""What an image or a clip costs a transformer: its tokens, each by itself, and each with every other.

A block of width d spends about 24 * d**2 operations on each of L tokens (projections and a feed-forward part of four
times the width) and 4 * d on each pair of them (attention). Up to a factor, that is L + L**2 / (6 * d).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.checks import array_of
from kohya_bucket.errors import PlanError


def cost_of(tokens: npt.ArrayLike, token_cost: tuple[float, float]) -> npt.NDArray[np.float64]:
    """[K] a * L + b * L**2 of [K] tokens L."""
    a, b = token_cost
    length = np.asarray(tokens, dtype=np.float64)
    return a * length + b * (length * length)


def pixels_of(sizes: IntArray) -> npt.NDArray[np.int64]:
    """[K] pixels of [K, 2] sizes."""
    wide = sizes.astype(np.int64)
    return wide[:, 0] * wide[:, 1]


def as_tokens(value: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """[K] tokens of one image of each bucket, as given to an option.

    Raises:
        PlanError: other than whole numbers, 1 or more.
    """
    given = array_of("bucket_tokens", value)
    if given.ndim != 1 or (given.size and (given.dtype.kind not in "iu" or given.min() < 1 or given.max() >= 2**31)):
        raise PlanError(f"bucket_tokens is {value!r}, but must be a list of whole numbers, 1 or more")
    return given.astype(np.int64)
