"""Which bucket an aspect belongs to: where one bucket hands over to the next along the axis of aspects.

The methods of `SWITCHING_METHODS`, each a set of switching points between neighbours `a < b` (aspects, width / height):

- `midpoint`: (a + b) / 2. What sd-scripts and NovelAI do by taking the smallest `|aspect - image aspect|`.
- `geometric`: sqrt(a * b). The smallest log-aspect distance, which is the smallest share of the image cut off.
- `area`: the bucket with the largest (bucket area - area cut off), the theoretical chart of the article
  "How are Images Assigned to Buckets?" (Sable Confusion, 2024).

A bucket is a step function of the image's aspect. Its switching points are found once, to the last bit, by bisection
over the doubles; after that an image costs a look-up in a small table and one comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import for_chunks
from kohya_bucket.buckets.bucket import Bucket, BucketSet
from kohya_bucket.buckets.choices import SWITCHING_METHODS
from kohya_bucket.buckets.sizes import FloatArray, IntArray, size_keys
from kohya_bucket.checks import one_of
from kohya_bucket.errors import BucketSettingsError


@dataclass(frozen=True)
class SwitchingPoint:
    """Images of `aspect` (width / height) or wider leave `narrower` for `wider`. `float(point)` is the aspect."""

    narrower: Bucket
    wider: Bucket
    aspect: float

    def __float__(self) -> float:
        return self.aspect

    @property
    def portrait(self) -> bool:
        """Both buckets are upright or square; a chart then counts in height / width, `1 / aspect`."""
        return self.wider.width <= self.wider.height


def switching_points(bucket_set: BucketSet, method: str = "midpoint") -> tuple[SwitchingPoint, ...]:
    """The hand-overs of a set in ascending aspect: one fewer than it has different aspects.

    Raises:
        BucketSettingsError: an unknown method.
    """
    switch = aspect_switch(bucket_set, method)
    buckets = [bucket_set[int(i)] for i in switch.order]
    return tuple(
        SwitchingPoint(narrower, wider, float(aspect))
        for narrower, wider, aspect in zip(buckets, buckets[1:], switch.thresholds)  # noqa: B905
    )


def aspect_switch(bucket_set: BucketSet, method: str = "midpoint") -> AspectSwitch:
    """The step function from aspects to buckets for a method; an exact tie goes to the first in set order.

    Raises:
        BucketSettingsError: an unknown method.
    """
    thresholds = SWITCHING_METHODS[one_of("switching", method, SWITCHING_METHODS, BucketSettingsError)].load()
    order = first_per_aspect(bucket_set.aspects)
    return AspectSwitch(order, thresholds(bucket_set, order))


def midpoint(bucket_set: BucketSet, order: IntArray) -> FloatArray:
    """[M - 1]: the smallest double at which the right one is nearer in float arithmetic."""
    return _hand_overs(bucket_set.aspects, order, _distances)


def geometric(bucket_set: BucketSet, order: IntArray) -> FloatArray:
    """[M - 1]: the smallest double `a` with a/left > right/a, compared as products so that no logarithm decides."""
    return _hand_overs(bucket_set.aspects, order, lambda a, left, right: (a * a, left * right))


def area(bucket_set: BucketSet, order: IntArray) -> FloatArray:
    """[M - 1]: where both neighbours have the same (area - cut off area).

    An image of aspect x between both fills the narrower bucket's height and the wider one's width, so the
    scores are `2 * area - height² x` and `2 * area - width² / x`; they are equal at the root of a quadratic.
    Where areas differ so much that the root leaves the two aspects, the nearer aspect is the limit: an image
    of exactly a bucket's aspect always gets that aspect.
    """
    sizes = bucket_set.sizes[order].astype(np.float64)
    (width_a, height_a), (width_b, height_b) = sizes[:-1].T, sizes[1:].T
    gain = width_a * height_a - width_b * height_b
    root = (gain + np.sqrt(gain**2 + (height_a * width_b) ** 2)) / height_a**2
    lowest = np.nextafter(width_a / height_a, np.inf)
    return np.asarray(np.clip(root, lowest, width_b / height_b))


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
        return cls(order, _hand_overs(aspects, order, _distances))

    def index(self, aspect: npt.NDArray[np.float64]) -> IntArray:
        """[N] image aspects -> [N] int32 bucket index."""
        if self._cells is not None:
            return self.order[self._cells.steps(aspect)]
        return self.order[np.searchsorted(self.thresholds, aspect, side="right")]


def first_per_aspect(aspects: FloatArray) -> IntArray:
    """Bucket indices in ascending aspect, of equal aspects only the first in set order."""
    _, first = np.unique(aspects, return_index=True)
    return first.astype(np.int32)


def _distances(a: FloatArray, left: FloatArray, right: FloatArray) -> tuple[FloatArray, FloatArray]:
    return np.abs(left - a), np.abs(right - a)


def _hand_overs(
    aspects: FloatArray, order: IntArray, distances: Callable[..., tuple[FloatArray, FloatArray]]
) -> FloatArray:
    """For each pair of neighbours the smallest double that is nearer to the right one; a tie is the first's of the set.

    Positive doubles order like their bit patterns, so bisection over the patterns ends at the exact one.
    """
    left, right = aspects[order[:-1]], aspects[order[1:]]
    right_first = order[:-1] > order[1:]
    below, above = left.view(np.int64).copy(), right.view(np.int64).copy()
    while np.any(above - below > 1):
        middle = below + (above - below) // 2
        to_left, to_right = distances(middle.view(np.float64), left, right)
        right_is_nearer = (to_right < to_left) | ((to_right == to_left) & right_first)
        above, below = np.where(right_is_nearer, middle, above), np.where(right_is_nearer, below, middle)
    return np.asarray(above.view(np.float64))


def nearest_indices(sizes: IntArray, bucket_set: BucketSet, switch: AspectSwitch) -> IntArray:
    """[N, 2] int32 sizes -> [N] int32 index in `bucket_set`; -1 where a side is below 1.

    An image of exactly a bucket's size takes that bucket, whatever `switch` says (sd-scripts looks there
    first); all others go by aspect.
    """
    index = np.empty(len(sizes), dtype=np.int32)
    # Where no two buckets share an aspect the nearest aspect finds the exact size by itself.
    exact = len(switch.order) < len(bucket_set)
    keys = size_keys(bucket_set.sizes)
    order = np.argsort(keys).astype(np.int32)
    keys = keys[order]

    def work(start: int, stop: int) -> None:
        rows = sizes[start:stop]
        readable = np.minimum(rows[:, 0], rows[:, 1]) > 0
        if readable.all():
            index[start:stop] = switch.index(rows[:, 0] / rows[:, 1])
        else:
            index[start:stop] = -1
            index[start:stop][readable] = switch.index(rows[readable, 0] / rows[readable, 1])
        if exact:
            row_keys = size_keys(rows)
            at = np.minimum(np.searchsorted(keys, row_keys), len(keys) - 1)
            same = keys[at] == row_keys
            index[start:stop][same] = order[at][same]

    for_chunks(len(sizes), work)
    return index


_MOST_CELLS = 1 << 14


class ThresholdTable:
    """`searchsorted(thresholds, a, side="right")` by a table over the leading bits of a double.

    A positive double's bit pattern orders like its value. The patterns are cut into cells so narrow that none
    holds two thresholds: the table says how many lie below the cell, one comparison settles the rest.
    """

    def __init__(self, shift: int, first: int, below: IntArray, thresholds: FloatArray) -> None:
        self.shift, self.first, self.below = shift, first, below
        self.thresholds = np.append(thresholds, np.inf)

    @classmethod
    def build(cls, thresholds: FloatArray) -> ThresholdTable | None:
        """None where the thresholds are too close or too far apart for a small table."""
        if not len(thresholds) or thresholds[0] <= 0 or not np.isfinite(thresholds[-1]):
            return None
        bits = thresholds.view(np.int64)
        for shift in range(49, 39, -1):
            cells = bits >> shift
            if np.all(cells[1:] > cells[:-1]):
                first, last = int(cells[0]) - 1, int(cells[-1]) + 1
                if last - first > _MOST_CELLS:
                    return None
                below = np.searchsorted(cells, np.arange(first, last + 1), side="left").astype(np.int32)
                return cls(shift, first, below, thresholds)
        return None

    def steps(self, aspect: FloatArray) -> IntArray:
        """[N] positive doubles -> [N] int32, how many thresholds are at or below each."""
        cell = (aspect.view(np.int64) >> self.shift) - self.first
        count = self.below.take(cell, mode="clip")
        count += aspect >= self.thresholds.take(count)
        return count
