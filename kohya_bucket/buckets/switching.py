"""Where one bucket hands over to the next along the axis of aspects.

The methods of `SWITCHING_METHODS`, each a set of switching points between neighbours `a < b` (aspects, width / height):

- `midpoint`: (a + b) / 2. What sd-scripts and NovelAI do by taking the smallest `|aspect - image aspect|`.
- `geometric`: sqrt(a * b). The smallest log-aspect distance, which is the smallest share of the image cut off.
- `area`: the bucket with the largest (bucket area - area cut off), the theoretical chart of the article
  "How are Images Assigned to Buckets?" (Sable Confusion, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays.nearest import AspectSwitch, first_double_where, first_per_aspect, midpoint_thresholds
from kohya_bucket.buckets.bucket import Bucket, BucketSet
from kohya_bucket.buckets.choices import SWITCHING_METHODS
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.checks import one_of
from kohya_bucket.errors import BucketSettingsError

__all__ = ["SwitchingPoint", "aspect_switch", "switching_points"]


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
    return midpoint_thresholds(bucket_set.aspects, order)


def geometric(bucket_set: BucketSet, order: IntArray) -> FloatArray:
    """[M - 1]: the smallest double `a` with a/left > right/a, compared as products so that no logarithm decides."""
    left, right = bucket_set.aspects[order[:-1]], bucket_set.aspects[order[1:]]
    left_first = order[:-1] < order[1:]

    def right_wins(a: FloatArray) -> npt.NDArray[np.bool_]:
        square, product = a * a, left * right
        return np.asarray((square > product) | ((square == product) & ~left_first))

    return first_double_where(right_wins, left, right)


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
