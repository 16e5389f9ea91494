"""What an image or a clip costs a transformer: its tokens, each by itself, and each with every other.

A block of width d spends about 24 * d**2 operations on each of L tokens (projections and a feed-forward part of four
times the width) and 4 * d on each pair of them (attention). Up to a factor, that is L + L**2 / (6 * d).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


def as_tokens(value: npt.ArrayLike, name: str = "bucket_tokens", least: int = 1) -> npt.NDArray[np.int64]:
    """[K] tokens of one image of each bucket; `name` is the argument's, for messages.

    Raises:
        PlanError: other than whole numbers, `least` or more.
    """
    given = array_of(name, value)
    if given.ndim != 1 or (
        given.size and (given.dtype.kind not in "iu" or given.min() < least or given.max() >= 2**31)
    ):
        raise PlanError(f"{name} is {value!r}, but must be a list of whole numbers, {least} or more")
    return given.astype(np.int64)


@dataclass(frozen=True, eq=False)
class CostFit:
    """a and b of a * L + b * L**2, and what they were fitted to.

    Attributes:
        token_cost: (a, b) in seconds, the `token_cost` of plans.
        tokens: [M] L of each shape.
        seconds: [M] of one step of each shape.
    """

    token_cost: tuple[float, float]
    tokens: npt.NDArray[np.int64]
    seconds: npt.NDArray[np.float64]

    @property
    def fitted(self) -> npt.NDArray[np.float64]:
        """[M] seconds that a and b give."""
        return cost_of(self.tokens, self.token_cost)

    @property
    def off(self) -> npt.NDArray[np.float64]:
        """[M] by how much that is more than was measured, as a share of it."""
        return self.fitted / self.seconds - 1

    @property
    def residual(self) -> float:
        """Root of the mean square of `off`: 0.05 is a fit that is 5 % off."""
        return float(np.sqrt(np.mean(self.off**2)))


def fit_cost(tokens: npt.ArrayLike, seconds: npt.ArrayLike) -> CostFit:
    """The a and b, 0 or more, with the least sum of squares of what they are off, as shares.

    Shares and not seconds, so that small shapes count like large ones: ranks wait for the same share of either.

    Args:
        tokens: [M] whole numbers, two different ones at least.
        seconds: [M] above 0.

    Raises:
        PlanError: other values.
    """
    length, taken = as_tokens(tokens), array_of("seconds", seconds, dtype=np.float64)
    if taken.shape != length.shape or not (np.isfinite(taken).all() and (taken > 0).all()):
        raise PlanError(f"seconds is {seconds!r}, but must be one number above 0 for each of {len(length)} shapes")
    if len(np.unique(length)) < 2:
        raise PlanError(f"tokens is {length.tolist()}: what they cost follows from two different numbers at least")
    largest = float(length.max())
    share = length / largest
    columns = np.stack([share, share**2], axis=1) / taken[:, None]
    tried = [np.linalg.lstsq(columns, np.ones(len(taken)), rcond=None)[0]]
    for k in (0, 1):  # with two numbers, the least that is allowed lies inside, or where one of them is 0
        alone = np.zeros(2)
        alone[k] = columns[:, k].sum() / (columns[:, k] ** 2).sum()
        tried.append(alone)
    allowed = [pair for pair in tried if (pair >= 0).all()]
    a, b = min(allowed, key=lambda pair: float(((columns @ pair - 1) ** 2).sum())).tolist()
    return CostFit((a / largest, b / largest**2), length, taken)


def measure_cost(
    step: Callable[[int], object],
    tokens: Sequence[int],
    *,
    rounds: int = 3,
    synchronize: Callable[[], object] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> CostFit:
    """Time a training step of each shape, and fit what tokens cost: the fastest round, after one that is not counted.

    What else a device does can only add to a step's time.

    Args:
        step: trains one image (or clip) of shape k, 0 to M - 1: forward and backward, as you train.
        tokens: [M] tokens of one image of each shape.
        rounds: how often each shape is timed.
        synchronize: waits until the device is done, such as `torch.cuda.synchronize`; without, times on a GPU are those
            of handing it the work.
        progress: called as `progress(done, total)`.

    Raises:
        PlanError: fewer than two different numbers of tokens.
    """
    shapes, times = len(tokens), [math.inf] * len(tokens)
    wait = synchronize or (lambda: None)
    for turn in range((rounds + 1) * shapes):
        k = turn % shapes
        wait()
        began = time.perf_counter()
        step(k)
        wait()
        if turn >= shapes:
            times[k] = min(times[k], time.perf_counter() - began)
        if progress is not None:
            progress(turn + 1, (rounds + 1) * shapes)
    return fit_cost(tokens, times)
