"""Which of a set's aspects is nearest to an image's, exactly as `argmin(abs(aspects - a))` answers it.

The answer is a step function of the image's aspect. Its switching points are found once, to the last bit,
by bisection over the doubles; after that an image costs a look-up in a small table and one comparison.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays.parallel_chunks import for_chunks
from kohya_bucket.buckets.arrays.threshold_table import ThresholdTable
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.sizes import FloatArray, IntArray, size_keys

__all__ = ["AspectSwitch", "first_double_where", "first_per_aspect", "midpoint_thresholds", "nearest_indices"]


class AspectSwitch:
    """Maps an aspect to a bucket by thresholds between neighbours.

    Args:
        order: [M] bucket index of each step, in ascending aspect.
        thresholds: [M - 1] float64 ascending; aspect >= thresholds[j] belongs to step j + 1 or later.
    """

    def __init__(self, order: IntArray, thresholds: FloatArray) -> None:
        self.order = order.astype(np.int32)
        self.thresholds = thresholds
        self._cells = ThresholdTable.build(thresholds)

    @classmethod
    def nearest(cls, aspects: FloatArray) -> AspectSwitch:
        """Smallest `|aspect - image aspect|`; the first in set order at a tie. `aspects` is [K]."""
        order = first_per_aspect(aspects)
        return cls(order, midpoint_thresholds(aspects, order))

    def index(self, aspect: npt.NDArray[np.float64]) -> IntArray:
        """[N] image aspects -> [N] int32 bucket index."""
        if self._cells is not None:
            return self.order[self._cells.steps(aspect)]
        return self.order[np.searchsorted(self.thresholds, aspect, side="right")]


def first_per_aspect(aspects: FloatArray) -> IntArray:
    """Bucket indices in ascending aspect, of equal aspects only the first in set order."""
    _, first = np.unique(aspects, return_index=True)
    return first.astype(np.int32)


def midpoint_thresholds(aspects: FloatArray, order: IntArray) -> FloatArray:
    """For each pair of neighbours the smallest double at which the right one wins in float arithmetic."""
    left, right = aspects[order[:-1]], aspects[order[1:]]
    left_first = order[:-1] < order[1:]

    def right_wins(a: FloatArray) -> npt.NDArray[np.bool_]:
        to_left, to_right = np.abs(left - a), np.abs(right - a)
        return np.asarray((to_right < to_left) | ((to_right == to_left) & ~left_first))

    return first_double_where(right_wins, left, right)


def first_double_where(
    holds: Callable[[FloatArray], npt.NDArray[np.bool_]], low: FloatArray, high: FloatArray
) -> FloatArray:
    """The smallest double in (low, high] at which `holds`, for M intervals at once; `holds` is true at `high`.

    Positive doubles order like their bit patterns, so bisection over the patterns ends at the exact one.
    """
    below, above = low.view(np.int64).copy(), high.view(np.int64).copy()
    while np.any(above - below > 1):
        middle = below + (above - below) // 2
        found = holds(middle.view(np.float64))
        above = np.where(found, middle, above)
        below = np.where(found, below, middle)
    return np.asarray(above.view(np.float64))


def nearest_indices(sizes: IntArray, bucket_set: BucketSet, switch: AspectSwitch) -> IntArray:
    """[N, 2] int32 sizes -> [N] int32 index in `bucket_set`; -1 where a side is below 1.

    An image of exactly a bucket's size takes that bucket, whatever `switch` says (sd-scripts looks there
    first); all others go by aspect.
    """
    index = np.empty(len(sizes), dtype=np.int32)
    # Where no two buckets share an aspect the nearest aspect finds the exact size by itself.
    exact = _ExactSizes(bucket_set) if len(switch.order) < len(bucket_set) else None

    def work(start: int, stop: int) -> None:
        rows = sizes[start:stop]
        width, height = rows[:, 0], rows[:, 1]
        readable = np.minimum(width, height) > 0
        if readable.all():
            index[start:stop] = switch.index(width / height)
        else:
            index[start:stop] = -1
            index[start:stop][readable] = switch.index(width[readable] / height[readable])
        if exact is not None:
            exact.overwrite(rows, index[start:stop])

    for_chunks(len(sizes), work)
    return index


class _ExactSizes:
    """Looks up images that have exactly the size of a bucket."""

    def __init__(self, bucket_set: BucketSet) -> None:
        keys = size_keys(bucket_set.sizes)
        self.order = np.argsort(keys).astype(np.int32)
        self.sorted = keys[self.order]

    def overwrite(self, sizes: IntArray, index: IntArray) -> None:
        """Set `index` in place where the size matches."""
        keys = size_keys(sizes)
        at = np.minimum(np.searchsorted(self.sorted, keys), len(self.sorted) - 1)
        exact = self.sorted[at] == keys
        index[exact] = self.order[at][exact]
