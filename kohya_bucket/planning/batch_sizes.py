"""What an image of a bucket costs, and how many make a global batch: a number, one per bucket, or a budget of pixels or
tokens.

What an image or a clip costs a transformer: its tokens, each by itself, and each with every other. A block of width d
spends about 24 * d**2 operations on each of L tokens (projections and a feed-forward part of four times the width) and
4 * d on each pair of them (attention). Up to a factor, that is L + L**2 / (6 * d).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.checks import array_of
from kohya_bucket.errors import PlanError

_TOO_MANY = 2**31


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
    array = array_of("bucket_tokens", value)
    if array.ndim != 1 or (array.size and (array.dtype.kind not in "iu" or array.min() < 1 or array.max() >= 2**31)):
        raise PlanError(f"bucket_tokens is {value!r}, but must be a list of whole numbers, 1 or more")
    return array.astype(np.int64)


def count_buckets(
    highest: int,
    batch_size: npt.ArrayLike | None,
    bucket_sizes: IntArray | None,
    bucket_tokens: npt.NDArray[np.int64] | None = None,
) -> int:
    """Number of buckets K: as many as sizes, tokens or a per-bucket `batch_size` name, else highest id + 1.

    Raises:
        PlanError: an id beyond the buckets that are described, or descriptions of different lengths.
    """
    sizes = array_of("batch_size", batch_size)
    entries = {
        "batch_size": len(sizes) if sizes.ndim == 1 else None,
        "bucket_sizes": None if bucket_sizes is None else len(bucket_sizes),
        "bucket_tokens": None if bucket_tokens is None else len(bucket_tokens),
    }
    described_by = {name: n for name, n in entries.items() if n is not None}
    if len(set(described_by.values())) > 1:
        (one, n), (other, m), *_ = described_by.items()
        raise PlanError(f"{one} has {n} entries and {other} {m}: give one for every bucket")
    described = next(iter(described_by.values()), None)
    if described is None:
        return highest + 1
    if highest >= described:
        raise PlanError(f"an image has bucket {highest}, but only buckets 0 to {described - 1} are described")
    return described


def per_rank_batches(
    batch_size: npt.ArrayLike | None,
    n_buckets: int,
    budgets: Sequence[Budget] = (),
    bucket_sizes: IntArray | None = None,
) -> npt.NDArray[np.int64]:
    """[K] images that one rank trains in one full step of each bucket.

    Args:
        batch_size: images, the same for all buckets or [K]; None only together with a budget.
        n_buckets: K, from `count_buckets`, which has held the length of `batch_size` to it.
        budgets: bounds by which small buckets train larger batches; the lowest of all bounds is taken.
        bucket_sizes: [K, 2] (width, height), for messages.

    Raises:
        PlanError: sizes below 1, fractions, no bound at all, or a bucket of which not even one image fits.
    """
    if batch_size is None and not budgets:
        raise PlanError(
            "batch_size is None and neither max_pixels nor max_tokens is set: one of these must bound batches"
        )
    bound = np.full(n_buckets, np.iinfo(np.int32).max, dtype=np.int64)
    if batch_size is not None:
        sizes = array_of("batch_size", batch_size)
        large = sizes.dtype == object and all(type(n) is int for n in sizes.flat)  # beyond 64 bits
        if sizes.ndim > 1 or not (large or sizes.dtype.kind in "iu") or (sizes.size and sizes.min() < 1):
            raise PlanError(f"batch_size is {batch_size!r}, but must be a whole number of images, 1 or more")
        if sizes.size and sizes.max() >= _TOO_MANY:
            raise PlanError(f"batch_size is {sizes.max()}, but must be less than {_TOO_MANY:,}")
        bound = np.broadcast_to(sizes.astype(np.int64), (n_buckets,)).copy()
    for budget in budgets:
        fits = budget.images()
        if fits.size and fits.min() < 1:
            k = int(fits.argmin())
            name = f"{k}" if bucket_sizes is None else "{}x{}".format(*bucket_sizes[k])
            raise PlanError(
                f"{budget.name} is {budget.limit:,}, but one image of bucket {name} has {budget.each[k]:,} "
                f"{budget.unit}: raise the budget, or leave that bucket out"
            )
        bound = np.minimum(bound, fits)
    return bound


def one_or_all(global_batch: npt.NDArray[np.int64]) -> int | list[int]:
    """[K] global batches as plain values: one number if all are equal."""
    values = np.unique(global_batch)
    return int(values[0]) if len(values) == 1 else [int(n) for n in global_batch]


def as_global_batch(value: npt.ArrayLike, n_buckets: int) -> npt.NDArray[np.int64]:
    """[K] from what `one_or_all` made.

    Raises:
        PlanError: another number of buckets, or sizes below 1.
    """
    sizes = array_of("global batch", value)
    if sizes.shape not in ((), (n_buckets,)) or sizes.dtype.kind not in "iu" or (sizes.size and sizes.min() < 1):
        raise PlanError(f"global batch is {value!r}, but must be one number or {n_buckets}, each 1 or more")
    return np.broadcast_to(sizes, (n_buckets,)).astype(np.int64)


@dataclass(frozen=True)
class Budget:
    """One bound.

    Attributes:
        name: of the option.
        limit: the bound.
        each: [K] what one image of each bucket takes of it, above 0.
        unit: what is counted, for messages.
    """

    name: str
    limit: int
    each: npt.NDArray[np.int64]
    unit: str

    def images(self) -> npt.NDArray[np.int64]:
        """[K] images of each bucket that fit; 0 where not even one does."""
        return np.asarray(self.limit // np.maximum(self.each, 1), dtype=np.int64)


def tokens_that_fit(peaks: Mapping[int, float], limit: float, reserve: float = 0.05) -> int:
    """The budget `max_tokens` with which every batch fits into memory, from what some batches took.

    A training step takes a fixed amount, and what grows with the tokens of its batch: a line through the peaks that
    were measured (of a batch of one and of a few, at the largest bucket) says how many fit.

    Args:
        peaks: {tokens of a batch: most memory that a step with it took}, two or more, in any unit.
        limit: memory there is, in that unit.
        reserve: share of it that stays free.

    Raises:
        PlanError: fewer than two peaks, some that do not lie on a rising line, or a limit into which no token fits.

    Examples:
        >>> tokens_that_fit({4096: 14.1, 16384: 20.3}, limit=24)  # GB, as torch.cuda.max_memory_reserved() says
        21338
    """
    tokens, peak = np.array(sorted(peaks.items()), dtype=np.float64).reshape(-1, 2).T
    if not math.isfinite(limit):
        raise PlanError(f"limit is {limit}, but must be the memory that there is")
    if len(tokens) < 2:
        raise PlanError(f"peaks holds {len(tokens)}, but a line needs two: measure a small and a large batch")
    slope, fixed = np.polyfit(tokens, peak, 1)
    off = float(np.abs(fixed + slope * tokens - peak).max())
    if not slope > 0 or off > 0.1 * peak.max():
        raise PlanError(
            f"peaks do not lie on a rising line (off by {off:.3g} of {peak.max():.3g}): measure each in its own "
            "process, after a few steps of one shape"
        )
    fitting = int((limit * (1 - reserve) - fixed) / slope)
    if fitting < 1:
        raise PlanError(
            f"limit is {limit:g}, but a step takes {fixed:.3g} without a single token: train a smaller model"
        )
    return fitting
