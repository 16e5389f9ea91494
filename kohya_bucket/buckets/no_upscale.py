"""No-upscale mode: an image's bucket is its own size, reduced to the area if it is larger, floored to the step.

Source: kohya-ss/sd-scripts, `BucketManager.select_bucket` with `no_upscale`, unchanged from 0.8.7 to 0.10.1.

And its opt-in corrections: the usual bucket where an image fills it, the largest fit, and a bound on what is cropped.
The largest admissible size for an image has sides that are multiples of the step, an area within the limit, and crops
little. sd-scripts floors one side, follows with the other and floors again: a 3072x3000 image at 1024x1024 gets 960x960
there although 1024x1024 fits (sd-scripts issues #2352, #731).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays import for_chunks
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.rule import OwnSizes, Reasons
from kohya_bucket.buckets.sizes import FloatArray, IntArray


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
    return np.asarray(np.floor(x / steps) * steps)


def usual_where_filled(plain: OwnSizes, usual: Placement, max_area: int) -> OwnSizes:
    """Images at least as large as their `usual` bucket go there; others keep their own size, floored to the step.

    Where that has no side left, or more pixels than the area, the size of `plain` stays.
    """
    assert plain.resized_sizes is not None  # no-upscale buckets bring their own
    filled = (usual.bucket_sizes <= plain.sizes).all(axis=1, keepdims=True)
    buckets = np.where(filled, usual.bucket_sizes, plain.sizes - plain.sizes % plain.unit)
    resized = np.where(filled, usual.resized_sizes, plain.sizes)
    as_plain = (buckets.min(axis=1) < 1) | (buckets.prod(axis=1, dtype=np.int64) > max_area)
    buckets[as_plain], resized[as_plain] = plain.bucket_sizes[as_plain], plain.resized_sizes[as_plain]
    reasons = np.where(as_plain, plain.reasons, np.uint8(Reason.PLACED))
    return OwnSizes(plain.sizes, buckets, reasons, plain.unit, resized)


def corrected_without_upscaling(plain: OwnSizes, max_area: int, largest: bool, max_crop: float | None) -> OwnSizes:
    """No-upscale buckets, corrected in place by `largest`, `max_crop` or both.

    With `largest`, each image takes the largest admissible size that crops no larger share than its bucket
    would, so no image keeps less area than before. Where it has no bucket, it takes the size that
    crops least. An image over `max_crop` takes the largest size within it, or none (`Reason.CROP_LIMIT`).
    """
    assert plain.resized_sizes is not None
    steps = plain.unit
    admissible = Admissible(max_area, steps, no_upscale=True)
    columns = plain.sizes, plain.bucket_sizes, plain.resized_sizes

    def work(start: int, stop: int) -> None:
        images, buckets, resized = (column[start:stop] for column in columns)
        reasons = plain.reasons[start:stop]

        def write(rows: npt.NDArray[np.intp], new: IntArray) -> None:
            buckets[rows], resized[rows] = new, geometry.covering_sizes(images[rows], new)

        # Buckets within `max_crop` may stay.
        placed = reasons == Reason.PLACED
        within = placed.copy()
        if max_crop is not None:
            within[placed] = geometry.crop_loss(*buckets[placed].T, *resized[placed].T) <= max_crop
        # A size that replaces one of them may crop no more than it does, each covered by the scaled image.
        max_loss = np.ones(len(images))
        kept = buckets[within]
        max_loss[within] = aspect_loss(kept[:, 0] / kept[:, 1], images[within, 0] / images[within, 1])

        # Who looks for the largest size: images over `max_crop`; with `largest` all but those of their bucket's size.
        search = placed & ~within
        if largest:
            search = ~(within & (images == buckets).all(axis=1)) & (reasons != Reason.UNREADABLE)
        # Without a bucket and without `max_crop` nothing bounds the crop: those images come last.
        rows = np.flatnonzero(search & (placed | (max_crop is not None)))
        largest_new = largest_sizes(images[rows], admissible, max_loss[rows], max_crop)
        # Rounding to pixels can hide an image's own bucket from the search: a smaller find does not replace it.
        smaller = largest_new.prod(axis=1, dtype=np.int64) < buckets[rows].prod(axis=1, dtype=np.int64)
        change = ~(smaller & within[rows])
        rows, largest_new = rows[change], largest_new[change]
        too_small = np.where(images[rows].min(axis=1) < steps, Reason.TOO_SMALL, Reason.CROP_LIMIT)
        reasons[rows] = np.where((largest_new > 0).all(axis=1), Reason.PLACED, too_small)
        write(rows, largest_new)

        # Images that had no bucket take the size that crops them least.

        if largest and max_crop is None:
            rows = np.flatnonzero(search & ~placed)
            least_cropped = least_crop_sizes(images[rows], admissible)
            exists = least_cropped[:, 0] > 0
            rows = rows[exists]
            reasons[rows] = Reason.PLACED
            write(rows, least_cropped[exists])

    for_chunks(len(plain.sizes), work)
    return plain


# Two equal aspects may differ in their last bits when they are computed from different sizes.
_SLACK = 1e-12


@dataclass(frozen=True)
class Admissible:
    """Which sizes may be used: multiples of `steps` pixels with at most `max_area` pixels and sides of `min_side` to
    `max_side`, and, with `no_upscale`, no side longer than the image's."""

    max_area: int
    steps: int
    no_upscale: bool
    min_side: int = 1
    max_side: int = 2**31 - 1

    @property
    def max_units(self) -> int:
        """Largest product of the two sides counted in steps."""
        return self.max_area // (self.steps * self.steps)

    def caps(self, sizes: IntArray) -> tuple[IntArray, IntArray]:
        """[N] longest width and height in steps for each image."""
        longest = min(self.max_units, self.max_side // self.steps)
        if not self.no_upscale:
            cap = np.full(len(sizes), longest, dtype=np.int32)
            return cap, cap
        caps = np.minimum(sizes // self.steps, longest).astype(np.int32)
        return caps[:, 0], caps[:, 1]


def largest_sizes(
    sizes: IntArray, admissible: Admissible, max_loss: FloatArray, max_crop: float | None = None
) -> IntArray:
    """[N, 2] int32 pixels: of the admissible sizes within the bounds the one with the largest area.

    Of equal areas the one that crops less is taken, then the narrower. Rows are 0 where no size is within.

    Args:
        sizes: [N, 2] int32 readable image sizes.
        max_loss: [N] bound on `aspect_loss`.
        max_crop: bound on the crop loss after rounding to pixels, the one a `Placement` reports.
    """
    steps, max_units = admissible.steps, admissible.max_units
    least_side = max(1, -(-admissible.min_side // steps))
    aspect = sizes[:, 0] / sizes[:, 1]
    # Rounding to pixels moves a side by up to half a pixel, so the walk starts a little outside the bound.
    bound = max_loss if max_crop is None else np.minimum(max_loss, max_crop + 0.5 / steps)
    # To keep this share of an image, a size needs an aspect from `aspect * least_kept` to `aspect / least_kept`.
    least_kept = np.maximum(1.0 - bound - 2 * _SLACK, 1e-9)
    cap_width, cap_height = admissible.caps(sizes)
    next_width = np.minimum(cap_width, np.sqrt(max_units * aspect / least_kept).astype(np.int64) + 1)
    best = np.zeros((len(sizes), 2), dtype=np.int32)
    best_area, best_loss = np.zeros(len(sizes), dtype=np.int64), np.full(len(sizes), np.inf)
    rows = np.flatnonzero((next_width >= least_side) & (cap_height >= least_side))
    # One width a pass for all images at once, from the widest possible down, until no narrower size can win.
    while len(rows):
        width, narrowest_aspect, cap = next_width[rows], aspect[rows] * least_kept[rows], cap_height[rows]
        height = np.minimum(np.minimum((width / narrowest_aspect + 1).astype(np.int64), cap), max_units // width)
        shortest = np.maximum(width * least_kept[rows] / aspect[rows] - 1, least_side)
        pending = np.flatnonzero(height >= shortest)
        while len(pending):  # lower the height until it is allowed, or below the shortest
            image, wide, tall = rows[pending], width[pending], height[pending]
            ratio = wide / tall
            loss = aspect_loss(ratio, aspect[image])
            allowed = loss <= max_loss[image] + _SLACK
            if max_crop is not None:
                sides = (wide * steps).astype(np.int32), (tall * steps).astype(np.int32)
                resized = geometry.cover_resize(sizes[image, 0], sizes[image, 1], aspect[image], *sides, ratio)
                allowed &= geometry.crop_loss(*sides, *resized) <= max_crop
            area = wide.astype(np.int64) * tall
            equal = (area == best_area[image]) & (loss <= best_loss[image] + _SLACK)
            improved = np.flatnonzero(allowed & ((area > best_area[image]) | equal))
            to = image[improved]
            best[to, 0], best[to, 1] = wide[improved] * steps, tall[improved] * steps
            best_area[to], best_loss[to] = area[improved], loss[improved]
            pending = pending[~allowed]
            height[pending] -= 1
            pending = pending[height[pending] >= shortest[pending]]
        next_width[rows] = narrower = width - 1
        # This bound on the area falls with the width, so an image whose best is above it is done.
        tallest = np.minimum(np.minimum(narrower / narrowest_aspect + 1, cap), max_units / np.maximum(narrower, 1))
        rows = rows[(narrower >= least_side) & (narrower * tallest >= best_area[rows])]
    return best


def least_crop_sizes(sizes: IntArray, admissible: Admissible) -> IntArray:
    """[N, 2] int32 pixels: the admissible size that crops each image least, the larger one of equals; 0 for none."""
    aspect = sizes[:, 0] / sizes[:, 1]
    cap_width, cap_height = admissible.caps(sizes)
    best = np.zeros((len(sizes), 2), dtype=np.int32)
    best_loss = np.full(len(sizes), np.inf)
    for width in range(1, int(cap_width.max(initial=0)) + 1):
        tallest = np.minimum(cap_height, admissible.max_units // width)
        floor = (width / aspect).astype(np.int64)
        for height in (np.clip(floor, 1, tallest), np.clip(floor + 1, 1, tallest)):
            allowed = (width <= cap_width) & (tallest >= 1)
            loss = aspect_loss(width / np.maximum(height, 1), aspect)
            better = allowed & (loss <= best_loss + _SLACK)
            best_loss[better] = np.minimum(best_loss[better], loss[better])
            best[better] = np.stack([np.full(len(sizes), width), height], axis=1)[better] * admissible.steps
    return best
