"""Images that suit no usual bucket, and images that a low longest side makes small."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.rule import BucketRule
from kohya_bucket.buckets.rules.kohya import KohyaBuckets
from kohya_bucket.buckets.sizes import FloatArray, IntArray, size_keys, sizes_of_keys
from kohya_bucket.errors import BucketSettingsError

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


def shortened(rule: BucketRule, sizes: IntArray, longest: int) -> str:
    """What the rule's longest side costs these images against `longest`, in one sentence without a full stop; ""
    for less than 1% of all pixels.

    Args:
        rule: only Kohya's rule with enlarging has such a limit.
        sizes: [N, 2] the images.
        longest: the usual limit.
    """
    if not isinstance(rule, KohyaBuckets) or rule.no_upscale or rule.max_size >= longest:
        return ""
    placements = _before_and_after(rule, sizes, max_size=longest)
    if placements is None:
        return ""
    both = np.logical_and(*(p.placed for p in placements))
    now, then = (p.bucket_sizes.astype(np.int64).prod(axis=1) for p in placements)
    grown = both & (then > now)
    if now[both].sum() > (1 - _MATTERS) * then[both].sum() or not grown.any():
        return ""
    fewer = 1 - float(now[grown].sum() / then[grown].sum())
    return (
        f"no bucket is longer than {rule.max_size}, so {grown.sum():,} of {both.sum():,} images "
        f"train with {fewer:.0%} fewer pixels than with {longest} ({_example(sizes, grown, placements)})"
    )


def narrowest_usual(resolution: tuple[int, int], step: int) -> int:
    """The usual shortest side at a resolution: half its side."""
    return max(step, int(math.isqrt(resolution[0] * resolution[1]) / LONGEST_ASPECT**0.5) // step * step)


def narrowed(rule: BucketRule, sizes: IntArray, lowest: int) -> str:
    """What the rule's shortest side crops off these images, [N, 2], against `lowest`, as `shortened`; "" for less
    than 1%."""
    if not isinstance(rule, KohyaBuckets) or rule.no_upscale or rule.min_size <= lowest:
        return ""
    placements = _before_and_after(rule, sizes, min_size=lowest)
    if placements is None:
        return ""
    both = np.logical_and(*(p.placed for p in placements))
    now, then = (p.crop_loss for p in placements)
    less = both & (then < now)
    if not less.any() or (now - then)[less].sum() < _MATTERS * both.sum():
        return ""
    return (
        f"no bucket is narrower than {rule.min_size}, so {less.sum():,} of {both.sum():,} images "
        f"lose {now[less].mean():.0%} to the crop, and {then[less].mean():.0%} with {lowest} "
        f"({_example(sizes, less, placements)})"
    )


def _before_and_after(rule: KohyaBuckets, sizes: IntArray, **changed: int) -> tuple[Placement, Placement] | None:
    """Where images go now, and with another limit; None where that one cannot work."""
    try:
        return rule.place(sizes), rule.changed(**changed).place(sizes)
    except BucketSettingsError:
        return None


def _example(sizes: IntArray, chosen: Mask, placements: tuple[Placement, Placement]) -> str:
    """The most frequent size of the chosen images, and its buckets."""
    frequent, counts = np.unique(size_keys(sizes[chosen]), return_counts=True)
    size = sizes_of_keys(frequent)[counts.argmax()]
    one = int(np.flatnonzero(chosen & (sizes == size).all(axis=1))[0])
    first, second = (Bucket(*p.bucket_sizes[one].tolist()) for p in placements)
    return f"{size[0]}x{size[1]} at {first} instead of {second}"
