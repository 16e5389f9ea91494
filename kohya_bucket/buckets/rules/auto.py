"""The rule `auto`: the nearest bucket of a set that was made from the images.

`AutoBuckets` has the name and arguments of the package bucketsampler.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.choices import AUTO_METHODS
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.optimal_set import admissible_sizes, least_crop_set
from kohya_bucket.buckets.rules.fixed import FixedBuckets
from kohya_bucket.buckets.rules.registry import RuleRequest
from kohya_bucket.buckets.sizes import (
    FloatArray,
    IntArray,
    Size,
    as_pair,
    as_resolution,
    as_sizes,
    positive,
    readable_sizes,
)
from kohya_bucket.buckets.switching import aspect_switch
from kohya_bucket.checks import one_of
from kohya_bucket.errors import BucketSettingsError


class AutoBuckets(FixedBuckets):
    """Nearest bucket of a set that was made from the data; `from_dims` makes it.

    Args:
        result: what `generate_buckets` returned; kept as `self.result`.
        of_set: the options of `FixedBuckets`.

    Examples:
        >>> sizes = [(4000, 3000), (4032, 3024), (1080, 1920), (1000, 1000)]
        >>> rule = AutoBuckets.from_dims(sizes, num_buckets=3, target=1024)
        >>> print(*rule.bucket_set)
        768x1344 1024x1024 1152x896
        >>> rule.assign(3000, 2000)
        Bucket(width=1152, height=896)
    """

    def __init__(self, result: AutoBucketResult, **of_set: Any) -> None:
        super().__init__(result.bucket_set, **of_set)
        self.result = result

    @classmethod
    def from_dims(
        cls,
        dims: npt.ArrayLike,
        *,
        num_buckets: int = 8,
        target: int | tuple[int, int] = 1024,
        **options: Any,
    ) -> AutoBuckets:
        """Generate buckets from [N, 2] sizes and place images into them.

        `options` are those of `FixedBuckets`, and what else `generate_buckets` takes.
        """
        of_set = {name: options.pop(name) for name in inspect.signature(FixedBuckets).parameters if name in options}
        return cls(generate_buckets(dims, num_buckets=num_buckets, target=target, **options), **of_set)


def auto_rule(request: RuleRequest) -> AutoBuckets:
    """`auto`, made from the images that could be read."""
    sizes = as_sizes(request.sizes)
    return AutoBuckets.from_dims(
        sizes[sizes.min(axis=1, initial=1) > 0], num_buckets=request.num_buckets, target=request.max_reso,
        vae_factor=request.reso_steps, min_side=request.min_size, max_side=request.max_size,
        method=request.auto_method, **request.set_options,
    )  # fmt: skip


_MOST_BUCKETS = 65_536


@dataclass(frozen=True)
class AutoBucketResult:
    """What `generate_buckets` found.

    Attributes:
        bucket_set: ascending in aspect.
        cluster_centers: log aspect each bucket stands for: the cluster's mean, or (`optimal`) the bucket's own.
        cluster_sizes: images of each cluster, or (`optimal`) of each bucket.
        iterations: of k-means; 0 for `optimal`.
        crop_loss_mean: mean share cropped off when each image takes its least cropping bucket, by the aspects alone:
            that of a `Placement` is of images resized to whole pixels.
        requested_k: the number asked for; fewer buckets come back where two clusters have the same size, or
            the data has fewer different aspects.
        method: `kmeans` or `optimal`.
    """

    bucket_set: BucketSet
    cluster_centers: tuple[float, ...]
    cluster_sizes: tuple[int, ...]
    iterations: int
    crop_loss_mean: float
    requested_k: int
    method: str = "kmeans"


def generate_buckets(
    dims: npt.ArrayLike,
    *,
    num_buckets: int = 8,
    target: int | tuple[int, int] = 1024,
    vae_factor: int = 64,
    seed: int = 0,
    max_iter: int = 100,
    name: str = "auto",
    description: str = "",
    method: str = "kmeans",
    min_side: int | None = None,
    max_side: int | None = None,
    min_fill: float = 0.0,
) -> AutoBucketResult:
    """A bucket set for the images at hand.

    `kmeans`: the log aspects are clustered, and each centre becomes the size nearest to the target's area.
    `optimal`: of all sets of `num_buckets` sizes with at most the target's area the one that crops least in total;
    for each aspect the largest size. Without `min_fill` that may be a small size whose aspect fits well.

    Args:
        dims: [N, 2] (width, height) in pixels.
        num_buckets: how many at most.
        target: side in pixels, or (width, height), whose area the buckets have or (`optimal`) do not exceed.
        vae_factor: every side is a multiple of this.
        seed: decides only where the quantiles that k-means starts from coincide.
        max_iter: steps of k-means at most.
        name: of the set.
        description: of the set.
        method: `kmeans` or `optimal`, as above.
        min_side: lower limit of each side in pixels.
        max_side: upper limit.
        min_fill: `optimal` only: least share of the target's area a bucket must have, e.g. 0.85.

    Raises:
        BucketSettingsError: no images, an unreadable one, or values from which no bucket follows.
    """
    sizes = readable_sizes(dims)
    if not len(sizes):
        raise BucketSettingsError("no image can be read, so there is nothing to make a bucket set from")
    size = as_resolution("target", target)
    positive(num_buckets=num_buckets, target=min(size), vae_factor=vae_factor)
    if num_buckets > _MOST_BUCKETS:
        raise BucketSettingsError(f"num_buckets is {num_buckets}, but must be {_MOST_BUCKETS:,} or less; 8 is usual")
    if seed < 0:
        raise BucketSettingsError(f"seed is {seed}, but must be 0 or more")
    one_of("method", method, AUTO_METHODS, BucketSettingsError)
    aspects = sizes[:, 0] / sizes[:, 1]
    low, high = _limits(size, vae_factor, min_side, max_side)
    asked = SetRequest(num_buckets, size, vae_factor, low, high, seed, max_iter, min_fill)
    made: AutoSet = AUTO_METHODS[method].load()(aspects, asked)
    bucket_set = BucketSet.from_dims(made.sizes, name=name, description=description, vae_factor=vae_factor)
    # The bucket that crops an image least is the nearest in log aspect.
    index = aspect_switch(bucket_set, "geometric").index(aspects)
    counts = made.counts or tuple(np.bincount(index, minlength=len(bucket_set)).tolist())
    mean = float(aspect_loss(bucket_set.aspects[index], aspects).mean())
    return AutoBucketResult(bucket_set, made.log_aspects, counts, made.iterations, mean, num_buckets, method)


def _limits(target: tuple[int, int], step: int, low: int | None, high: int | None) -> tuple[int, int]:
    """The shortest and longest side of a bucket, multiples of `step`, within limits that may be None."""
    area = target[0] * target[1]
    if area < step**2:
        raise BucketSettingsError(f"a target of {target[0]}x{target[1]} is smaller than one square of {step}")
    shortest = step if low is None else -(-low // step) * step
    longest = (area // step if high is None else high) // step * step
    if not step <= shortest <= longest:
        raise BucketSettingsError(f"no multiple of {step} lies within the sides {low}..{high}")
    return shortest, longest


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
class SetRequest:
    """What is asked of a method: the arguments of `generate_buckets`, with sides of `low` to `high` pixels."""

    num_buckets: int
    target: Size
    factor: int
    low: int
    high: int
    seed: int
    max_iter: int
    min_fill: float

    @property
    def area(self) -> int:
        """Pixels of the target."""
        return self.target[0] * self.target[1]


def clusters(aspects: FloatArray, asked: SetRequest) -> AutoSet:
    """`kmeans`: the log aspects are clustered, and each centre becomes the size nearest to the target's area."""

    def side(exact: float) -> int:
        return min(max(round(exact / asked.factor) * asked.factor, asked.low), asked.high)

    centres, counts, iterations = kmeans_1d(np.log(aspects), asked.num_buckets, asked.seed, asked.max_iter)
    images: dict[Size, int] = {}
    stands_for: dict[Size, float] = {}
    for centre, count in zip(centres.tolist(), counts.tolist(), strict=True):
        height = math.sqrt(asked.area / math.exp(centre))
        size = side(math.exp(centre) * height), side(height)
        images[size] = images.get(size, 0) + count
        stands_for.setdefault(size, centre)
    return AutoSet(list(images), tuple(stands_for.values()), tuple(images.values()), iterations)


def optimum(aspects: FloatArray, asked: SetRequest) -> AutoSet:
    """`optimal`: of all sets of sizes with at least `min_fill` of the area the one that crops least in total."""
    candidates = admissible_sizes(asked.area, asked.factor, asked.min_fill, asked.low, asked.high)
    if not len(candidates):
        width, height = asked.target
        raise BucketSettingsError(
            f"no size of multiples of {asked.factor} has sides of {asked.low}..{asked.high} and at least "
            f"{asked.min_fill} of {width}x{height} pixels: lower min_fill"
        )
    pairs = [as_pair(size) for size in least_crop_set(aspects, candidates, asked.num_buckets)[0]]
    return AutoSet(pairs, tuple(math.log(w / h) for w, h in pairs))


def kmeans_1d(values: FloatArray, k: int, seed: int = 0, max_iter: int = 100) -> tuple[FloatArray, IntArray, int]:
    """Ascending centres, the number of values nearest to each, and the iterations that were needed.

    Starts from evenly spaced quantiles, so nothing is drawn; where quantiles coincide, as many different values
    as are missing are drawn with `seed`. Fewer centres come back where `values` has fewer different ones, or a
    centre lost all of its values.

    Args:
        values: [N] float64, N >= 1; their order decides nothing.
        k: number of centres, >= 1.
    """
    values = np.sort(values)
    distinct = np.unique(values)
    centres = np.unique(np.quantile(values, np.linspace(0.0, 1.0, k + 2)[1:-1]))
    missing = min(k, len(distinct)) - len(centres)
    if missing > 0:
        rest = np.setdiff1d(distinct, centres)
        extra = np.random.default_rng(seed).choice(rest, size=min(missing, len(rest)), replace=False)
        centres = np.union1d(centres, extra)

    def cluster_ends(centres: FloatArray) -> npt.NDArray[np.int64]:
        """Where each cluster begins in the sorted values, and the end of the last: halfway between centres."""
        return np.concatenate([[0], np.searchsorted(values, (centres[1:] + centres[:-1]) / 2), [len(values)]])

    sums = np.concatenate([[0.0], np.cumsum(values)])
    iterations = 0
    for _ in range(max_iter):
        iterations += 1
        ends = cluster_ends(centres)
        counts = np.diff(ends)
        filled = counts > 0
        moved = np.unique(np.diff(sums[ends])[filled] / counts[filled])
        if len(moved) == len(centres) and np.allclose(moved, centres, rtol=0, atol=1e-12):
            break
        centres = moved
    return centres, np.diff(cluster_ends(centres)).astype(np.int32), iterations
