"""No-upscale mode: an image's bucket is its own size, reduced to the area if it is larger, floored to the step.

Source: kohya-ss/sd-scripts, `BucketManager.select_bucket` with `no_upscale`, unchanged from 0.8.7 to 0.10.1.
"""

from __future__ import annotations

import numpy as np

from kohya_bucket.buckets.arrays import for_chunks
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.rule import OwnSizes, Reasons
from kohya_bucket.buckets.sizes import FloatArray, IntArray

__all__ = ["without_upscaling"]


def without_upscaling(sizes: IntArray, max_area: int, steps: int) -> OwnSizes:
    """The assignment of [N, 2] int32 sizes in no-upscale mode."""
    bucket_sizes, resized_sizes = np.empty_like(sizes), np.empty_like(sizes)
    reasons = np.empty(len(sizes), dtype=np.uint8)

    def work(start: int, stop: int) -> None:
        width, height, reasons[start:stop] = _resized(sizes[start:stop], max_area, steps)
        for side, resized in enumerate((width, height)):
            resized_sizes[start:stop, side] = resized
            bucket_sizes[start:stop, side] = _floored(resized, steps)

    for_chunks(len(sizes), work)
    return OwnSizes(sizes, bucket_sizes, reasons, steps, resized_sizes)


def _resized(sizes: IntArray, max_area: int, steps: int) -> tuple[FloatArray, FloatArray, Reasons]:
    """What images are scaled to: [N] widths and heights, 0 where unreadable, and reasons."""
    width, height = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    unreadable = np.minimum(width, height) < 1
    if unreadable.any():
        width[unreadable] = height[unreadable] = 1
    large = np.flatnonzero(width * height > max_area)
    if len(large):
        width[large], height[large] = _reduced(width[large] / height[large], max_area, steps)
    reasons = np.where(np.minimum(width, height) < steps, np.uint8(Reason.TOO_SMALL), np.uint8(Reason.PLACED))
    if unreadable.any():
        width[unreadable] = height[unreadable] = 0
        reasons[unreadable] = Reason.UNREADABLE
    return width, height, reasons


def _reduced(aspect: FloatArray, max_area: int, steps: int) -> tuple[FloatArray, FloatArray]:
    """Images scaled to the area: either side floored to the step; of the two the one with less aspect error."""
    ideal_width = np.sqrt(max_area * aspect)
    by_width, by_height = (_floored(np.floor(side + 0.5), steps) for side in (ideal_width, max_area / ideal_width))
    height_exact, width_exact = by_width / aspect, by_height * aspect
    height_of_width, width_of_height = (_floored(np.floor(side + 0.5), steps) for side in (height_exact, width_exact))
    # A candidate that floors to 0 ends as a division by zero in sd-scripts, whichever candidate it is.
    dead = np.minimum(height_of_width, by_height) == 0
    if dead.any():
        height_of_width[dead] = by_height[dead] = 1
    error = np.abs(by_width / height_of_width - aspect)
    take_width = error < np.abs(width_of_height / by_height - aspect)
    width = np.where(take_width, by_width, np.floor(width_exact + 0.5))
    height = np.where(take_width, np.floor(height_exact + 0.5), by_height)
    if dead.any():
        width[dead] = height[dead] = 0
    return width, height


def _floored(x: FloatArray, steps: int) -> FloatArray:
    """Whole multiples of `steps` at or below x >= 0, as doubles: exact below 2**53, and much faster than integers."""
    # For a power of two multiplying by the inverse is exact as well.
    out = x * (1 / steps) if steps & (steps - 1) == 0 else x / steps
    np.floor(out, out=out)
    out *= steps
    return out
