"""Bucket sets made from the data: k-means on log aspect, or the exact optimum.

`generate_buckets` has the name and arguments of the package bucketsampler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.auto_sets.methods import AutoSet, SetRequest, Sides
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.choices import AUTO_METHODS
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.sizes import FloatArray, IntArray, as_resolution, readable_sizes
from kohya_bucket.buckets.switching import aspect_switch
from kohya_bucket.checks import one_of
from kohya_bucket.errors import BucketSettingsError

__all__ = ["AutoBucketResult", "generate_buckets"]

_MOST_BUCKETS = 65_536


@dataclass(frozen=True)
class AutoBucketResult:
    """What `generate_buckets` found.

    Attributes:
        bucket_set: ascending in aspect.
        cluster_centers: log aspect each bucket stands for: the cluster's mean, or (`optimal`) the bucket's own.
        cluster_sizes: images of each cluster, or (`optimal`) of each bucket.
        iterations: of k-means; 0 for `optimal`.
        crop_loss_mean: mean share cropped off when each image takes its least cropping bucket.
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
        target: side in pixels, or (width, height), whose area the buckets have or (`optimal`) do not exceed.
        vae_factor: every side is a multiple of this.
        seed: decides only where the quantiles that k-means starts from coincide.
        min_side, max_side: limits of each side in pixels.
        min_fill: `optimal` only: least share of the target's area a bucket must have, e.g. 0.85.

    Raises:
        BucketSettingsError: no images, an unreadable one, or values from which no bucket follows.
    """
    sizes = readable_sizes(dims)
    if not len(sizes):
        raise BucketSettingsError("dims holds no image: a bucket set cannot be made from nothing")
    size = as_resolution("target", target)
    for key, value in (("num_buckets", num_buckets), ("target", min(size)), ("vae_factor", vae_factor)):
        if value < 1:
            raise BucketSettingsError(f"{key} is {value}, but must be 1 or more")
    if num_buckets > _MOST_BUCKETS:
        raise BucketSettingsError(f"num_buckets is {num_buckets}, but must be {_MOST_BUCKETS:,} or less; 8 is usual")
    if seed < 0:
        raise BucketSettingsError(f"seed is {seed}, but must be 0 or more")
    one_of("method", method, AUTO_METHODS, BucketSettingsError)
    sides = Sides.within(size, vae_factor, min_side, max_side)
    aspects = sizes[:, 0] / sizes[:, 1]
    found: AutoSet = AUTO_METHODS[method].load()(aspects, SetRequest(num_buckets, sides, seed, max_iter, min_fill))
    bucket_set = BucketSet.from_dims(found.sizes, name=name, description=description, vae_factor=vae_factor)
    loss, index = _least_loss(aspects, bucket_set)
    counts = found.counts or tuple(np.bincount(index, minlength=len(bucket_set)).tolist())
    mean = float(loss.mean())
    return AutoBucketResult(bucket_set, found.log_aspects, counts, found.iterations, mean, num_buckets, method)


def _least_loss(aspects: FloatArray, bucket_set: BucketSet) -> tuple[FloatArray, IntArray]:
    index = aspect_switch(bucket_set, "geometric").index(aspects)
    return aspect_loss(bucket_set.aspects[index], aspects), index
