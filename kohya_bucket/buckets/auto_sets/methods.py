"""The ways to make a bucket set from images: each takes their aspects and a `SetRequest`, and gives an `AutoSet`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from kohya_bucket.buckets.auto_sets.kmeans import kmeans_1d
from kohya_bucket.buckets.auto_sets.optimal_set import admissible_sizes, least_crop_set
from kohya_bucket.buckets.sizes import FloatArray
from kohya_bucket.errors import BucketSettingsError

__all__ = ["AutoSet", "SetRequest", "Sides", "clusters", "optimum"]

Size = tuple[int, int]


@dataclass(frozen=True)
class AutoSet:
    """A set as `AutoBucketResult` has it.

    Attributes:
        sizes: (width, height) of each bucket, ascending in aspect.
        log_aspects: log aspect that each bucket stands for.
        counts: images of each bucket's cluster; empty where each bucket counts its own.
        iterations: that were needed to find it; 0 where it is computed.
    """

    sizes: list[Size]
    log_aspects: tuple[float, ...]
    counts: tuple[int, ...] = ()
    iterations: int = 0


@dataclass(frozen=True)
class Sides:
    """Which sizes may be in a set: about `target`'s area, sides of `low` to `high` pixels, multiples of `factor`."""

    target: Size
    factor: int
    low: int
    high: int

    @classmethod
    def within(cls, target: Size, factor: int, min_side: int | None, max_side: int | None) -> Sides:
        """Limits rounded inwards to the factor; None is what the area allows.

        Raises:
            BucketSettingsError: no size is left.
        """
        area = target[0] * target[1]
        if area < factor**2:
            raise BucketSettingsError(f"a target of {target[0]}x{target[1]} is smaller than one square of {factor}")
        low = factor if min_side is None else -(-min_side // factor) * factor
        high = area // factor if max_side is None else max_side // factor * factor
        if not factor <= low <= high:
            raise BucketSettingsError(f"no multiple of {factor} lies within the sides {min_side}..{max_side}")
        return cls(target, factor, low, high)

    @property
    def area(self) -> int:
        """Pixels of the target."""
        return self.target[0] * self.target[1]

    def nearest(self, log_aspect: float) -> Size:
        """The size of about the area at an aspect, each side rounded to the factor and within the limits."""
        height = math.sqrt(self.area / math.exp(log_aspect))
        return self._side(math.exp(log_aspect) * height), self._side(height)

    def _side(self, exact: float) -> int:
        return min(max(round(exact / self.factor) * self.factor, self.low), self.high)


@dataclass(frozen=True)
class SetRequest:
    """What is asked of a method; the arguments of `generate_buckets` of these names."""

    num_buckets: int
    sides: Sides
    seed: int
    max_iter: int
    min_fill: float


def clusters(aspects: FloatArray, asked: SetRequest) -> AutoSet:
    """`kmeans`: the log aspects are clustered, and each centre becomes the size nearest to the target's area."""
    centres, counts, iterations = kmeans_1d(np.log(aspects), asked.num_buckets, asked.seed, asked.max_iter)
    images: dict[Size, int] = {}
    stands_for: dict[Size, float] = {}
    for centre, count in zip(centres.tolist(), counts.tolist(), strict=True):
        size = asked.sides.nearest(centre)
        images[size] = images.get(size, 0) + count
        stands_for.setdefault(size, centre)
    return AutoSet(list(images), tuple(stands_for.values()), tuple(images.values()), iterations)


def optimum(aspects: FloatArray, asked: SetRequest) -> AutoSet:
    """`optimal`: of all sets of sizes with at least `min_fill` of the area the one that crops least in total."""
    sides = asked.sides
    candidates = admissible_sizes(sides.area, sides.factor, asked.min_fill, sides.low, sides.high)
    if not len(candidates):
        width, height = sides.target
        raise BucketSettingsError(
            f"no size of multiples of {sides.factor} has sides of {sides.low}..{sides.high} and at least "
            f"{asked.min_fill} of {width}x{height} pixels: lower min_fill"
        )
    best, _ = least_crop_set(aspects, candidates, asked.num_buckets)
    pairs = [(int(w), int(h)) for w, h in best]
    return AutoSet(pairs, tuple(math.log(w / h) for w, h in pairs))
