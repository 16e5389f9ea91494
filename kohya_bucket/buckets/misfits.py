"""Images that suit no usual bucket, and images that a low longest side makes small."""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.rule import BucketRule
from kohya_bucket.buckets.sizes import FloatArray, IntArray, size_keys, sizes_of_keys
from kohya_bucket.errors import KohyaBucketError

Mask = npt.NDArray[np.bool_]

LONGEST_ASPECT = 4.0
"""Of the longest bucket with usual limits: twice the side of the resolution, by half of it."""
FAR = 0.25
"""Distance in log aspect beyond which 22% and more is cut off."""
BARELY = 1.001
"""Factor of the sides up to which an image counts as not enlarged: sides are rounded to whole pixels."""
MUCH_ENLARGED = 2.0
"""Factor of the sides above which three of four pixels that are trained are made up."""

_MATTERS = 0.01


def enlargement(sizes: IntArray, placement: Placement) -> FloatArray:
    """[N] factor by which each image's sides are scaled: above 1 it is enlarged. NaN without a bucket."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = placement.resized_sizes / sizes
    # Sides are rounded to whole pixels apart from each other; the longer one says the factor best.
    longer = (sizes[:, 1] > sizes[:, 0]).astype(np.intp)
    out = np.take_along_axis(factors, longer[:, None], axis=1)[:, 0]
    return np.where(placement.placed, out, np.nan)


def aspect_distance(sizes: IntArray, placement: Placement) -> FloatArray:
    """[N] |log(image aspect / bucket aspect)|; NaN without a bucket."""
    placed = placement.placed
    out = np.full(len(sizes), np.nan)
    image, bucket = sizes[placed].astype(np.float64), placement.bucket_sizes[placed].astype(np.float64)
    out[placed] = np.abs(np.log(image[:, 0] / image[:, 1]) - np.log(bucket[:, 0] / bucket[:, 1]))
    return out


def too_small(sizes: IntArray, placement: Placement) -> Mask:
    """[N] images that are enlarged more than `MUCH_ENLARGED` times."""
    return np.asarray(enlargement(sizes, placement) > MUCH_ENLARGED)


def too_long(sizes: IntArray, placement: Placement) -> Mask:
    """[N] images that are further than `FAR` from their bucket, and would be from the longest usual one."""
    distance = aspect_distance(sizes, placement)
    out = np.asarray(distance > FAR)
    image = sizes[out].astype(np.float64)
    out[out] = np.abs(np.log(image[:, 0] / image[:, 1])) - math.log(LONGEST_ASPECT) > FAR
    return out


def limit_cost(what: str, rule: BucketRule, wider: Callable[[], BucketRule], sizes: IntArray, other: int) -> str:
    """What a limit of a rule's sides costs images, in one sentence without a full stop: pixels, or what is cropped off,
    whichever is more; "" for less than 1%.

    Args:
        what: the limit in words.
        wider: makes the same rule with another limit.
        sizes: [N, 2] the images.
        other: that limit.
    """
    try:
        now, then = rule.place(sizes), wider().place(sizes)
    except KohyaBucketError:  # the other limit does not work with the rest
        return ""
    both = now.placed & then.placed
    share, images, loss = max(_fewer_pixels(now, then, both), _more_cropped(now, then, both), key=itemgetter(0))
    if share < _MATTERS:
        return ""
    example = _example(sizes, images, (now, then))
    return f"{what}, so {images.sum():,} of {both.sum():,} images {loss} {other} ({example})"


Loss = tuple[float, Mask, str]
"""How much is lost, as a share of all images; [N] those that lose something, and what they do "with" another limit."""


def _fewer_pixels(now: Placement, then: Placement, both: Mask) -> Loss:
    pixels, others = (placement.bucket_sizes.astype(np.int64).prod(axis=1) for placement in (now, then))
    grown = both & (others > pixels)
    if not grown.any():
        return 0.0, grown, ""
    fewer = 1 - float(pixels[grown].sum() / others[grown].sum())
    return 1 - float(pixels[both].sum() / others[both].sum()), grown, f"train with {fewer:.0%} fewer pixels than with"


def _more_cropped(now: Placement, then: Placement, both: Mask) -> Loss:
    less = both & (then.crop_loss < now.crop_loss)
    if not less.any():
        return 0.0, less, ""
    loss, other = now.crop_loss[less], then.crop_loss[less]
    share = float((loss - other).sum() / both.sum())
    return share, less, f"lose {loss.mean():.0%} to the crop, and {other.mean():.0%} with"


def narrowest_usual(resolution: tuple[int, int], step: int) -> int:
    """The usual shortest side at a resolution: half its side."""
    return max(step, int(math.isqrt(resolution[0] * resolution[1]) / LONGEST_ASPECT**0.5) // step * step)


def _example(sizes: IntArray, chosen: Mask, placements: tuple[Placement, Placement]) -> str:
    """The most frequent size of the chosen images, and its buckets."""
    frequent, counts = np.unique(size_keys(sizes[chosen]), return_counts=True)
    size = sizes_of_keys(frequent)[counts.argmax()]
    one = int(np.flatnonzero(chosen & (sizes == size).all(axis=1))[0])
    first, second = (Bucket(*p.bucket_sizes[one].tolist()) for p in placements)
    return f"{size[0]}x{size[1]} at {first} instead of {second}"
