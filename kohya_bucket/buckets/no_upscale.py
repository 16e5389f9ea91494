"""No-upscale mode: an image's bucket is its own size, reduced to the area if it is larger, floored to the step.

Source: kohya-ss/sd-scripts, `BucketManager.select_bucket` with `no_upscale`, unchanged from 0.8.7 to 0.10.1.

And its opt-in corrections: the largest fit, and a bound on what is cropped. The largest admissible size for an image
has sides that are multiples of the step, an area within the limit, and crops little. sd-scripts floors one side,
follows with the other and floors again: a 3072x3000 image at 1024x1024 gets 960x960 there although 1024x1024 fits
(sd-scripts issues #2352, #731).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays import for_chunks
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.placement import Reason
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
    # For a power of two multiplying by the inverse is exact as well.
    out = x * (1 / steps) if steps & (steps - 1) == 0 else x / steps
    np.floor(out, out=out)
    out *= steps
    return out


def corrected_without_upscaling(
    sizes: IntArray, max_area: int, steps: int, largest: bool, max_crop: float | None
) -> OwnSizes:
    """Kohya's no-upscale buckets of [N, 2] sizes, corrected.

    With `largest`, each image takes the largest admissible size that crops no larger share than Kohya's bucket
    would, so no image keeps less area than before. Where Kohya's rule has no bucket, it takes the size that
    crops least. An image over `max_crop` takes the largest size within it, or none (`Reason.CROP_LIMIT`).
    """
    plain = without_upscaling(sizes, max_area, steps)
    bucket_sizes, resized, reasons = plain.bucket_sizes, plain.resized_sizes, plain.reasons
    assert resized is not None  # they are sd-scripts' own
    admissible = Admissible(max_area, steps, no_upscale=True)

    def work(start: int, stop: int) -> None:
        rows = slice(start, stop)
        _correct(sizes[rows], bucket_sizes[rows], resized[rows], reasons[rows], admissible, largest, max_crop)

    for_chunks(len(sizes), work)
    return OwnSizes(sizes, bucket_sizes, reasons, steps, resized)


def _correct(
    sizes: IntArray, bucket_sizes: IntArray, resized: IntArray, reasons: Reasons,
    admissible: Admissible, largest: bool, max_crop: float | None,
) -> None:  # fmt: skip
    placed = reasons == Reason.PLACED
    within = placed.copy()
    if max_crop is not None:
        within[placed] = geometry.crop_loss(*bucket_sizes[placed].T, *resized[placed].T) <= max_crop
    # What a bucket of Kohya's choice crops from an image that is scaled to cover it bounds the search.
    bound = np.ones(len(sizes))
    kept = bucket_sizes[within]
    bound[within] = aspect_loss(kept[:, 0] / kept[:, 1], sizes[within, 0] / sizes[within, 1])

    untouched = within & (sizes == bucket_sizes).all(axis=1)
    search = ~untouched & (reasons != Reason.UNREADABLE)
    if not largest:
        search &= placed & ~within
    rows = np.flatnonzero(search & (placed | (max_crop is not None)))
    found = largest_sizes(sizes[rows], admissible, bound[rows], max_crop)
    # Kohya's own bucket stays where rounding to pixels hides it from the search.
    smaller = found.prod(axis=1, dtype=np.int64) < bucket_sizes[rows].prod(axis=1, dtype=np.int64)
    change = ~(smaller & within[rows])
    rows, found = rows[change], found[change]
    possible = (found > 0).all(axis=1)
    too_small = sizes[rows].min(axis=1) < admissible.steps
    reasons[rows] = np.where(possible, Reason.PLACED, np.where(too_small, Reason.TOO_SMALL, Reason.CROP_LIMIT))
    _write(rows, found, sizes, bucket_sizes, resized)

    if largest and max_crop is None:
        rows = np.flatnonzero(search & ~placed)
        found = least_crop_sizes(sizes[rows], admissible)
        rows, found = rows[found[:, 0] > 0], found[found[:, 0] > 0]
        reasons[rows] = Reason.PLACED
        _write(rows, found, sizes, bucket_sizes, resized)


def _write(
    rows: npt.NDArray[np.intp], found: IntArray, sizes: IntArray, bucket_sizes: IntArray, resized: IntArray
) -> None:
    bucket_sizes[rows], resized[rows] = found, geometry.covering_sizes(sizes[rows], found)


# Two equal aspects may differ in their last bits when they are computed from different sizes.
_SLACK = 1e-12

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Admissible:
    """Which sizes may be used: multiples of `steps` pixels with at most `max_area` pixels, and, with
    `no_upscale`, no side longer than the image's."""

    max_area: int
    steps: int
    no_upscale: bool

    @property
    def max_units(self) -> int:
        """Largest product of the two sides counted in steps."""
        return self.max_area // (self.steps * self.steps)

    def caps(self, sizes: IntArray) -> tuple[IntArray, IntArray]:
        """[N] longest width and height in steps for each image."""
        if not self.no_upscale:
            cap = np.full(len(sizes), self.max_units, dtype=np.int32)
            return cap, cap
        caps = np.minimum(sizes // self.steps, self.max_units).astype(np.int32)
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
    search = _Search(sizes, admissible, max_loss, max_crop)
    while len(search.rows):
        search.try_widths()
    return search.best_sizes


class _Search:
    """Walks down from the widest size in question, for all images at once, until no narrower one can win."""

    def __init__(self, sizes: IntArray, admissible: Admissible, max_loss: FloatArray, max_crop: float | None) -> None:
        self.sizes, self.admissible, self.max_crop = sizes, admissible, max_crop
        self.aspect = sizes[:, 0] / sizes[:, 1]
        self.max_loss = max_loss + _SLACK
        # Rounding to pixels moves a side by up to half a pixel, so the walk starts a little outside the bound.
        bound = max_loss if max_crop is None else np.minimum(max_loss, max_crop + 0.5 / admissible.steps)
        self.keep = np.maximum(1.0 - bound - 2 * _SLACK, 1e-9)
        self.cap_width, self.cap_height = admissible.caps(sizes)
        widest = np.sqrt(admissible.max_units * self.aspect / self.keep)
        self.width = np.minimum(self.cap_width, widest.astype(np.int64) + 1)
        self.best_sizes = np.zeros((len(sizes), 2), dtype=np.int32)
        self.best_area = np.zeros(len(sizes), dtype=np.int64)
        self.best_loss = np.full(len(sizes), np.inf)
        self.rows = np.flatnonzero((self.width >= 1) & (self.cap_height >= 1))

    def try_widths(self) -> None:
        """One width for each image that is still searched: its largest allowed height, if any."""
        rows = self.rows
        width = self.width[rows]
        tallest = (width / (self.aspect[rows] * self.keep[rows]) + 1).astype(np.int64)
        height = np.minimum(np.minimum(tallest, self.cap_height[rows]), self.admissible.max_units // width)
        shortest = np.maximum(width * self.keep[rows] / self.aspect[rows] - 1, 1)
        pending = np.flatnonzero(height >= shortest)
        while len(pending):
            at = rows[pending]
            allowed, loss = self._judge(at, width[pending], height[pending])
            self._take(at[allowed], width[pending][allowed], height[pending][allowed], loss[allowed])
            pending = pending[~allowed]
            height[pending] -= 1
            pending = pending[height[pending] >= shortest[pending]]
        self.width[rows] = width - 1
        # No narrower size can have a larger area than its width and the tallest height for it allow.
        reach = (width - 1) * np.minimum(
            np.minimum((width - 1) / (self.aspect[rows] * self.keep[rows]) + 1, self.cap_height[rows]),
            self.admissible.max_units / np.maximum(width - 1, 1),
        )
        self.rows = rows[(width > 1) & (reach >= self.best_area[rows])]

    def _judge(self, at: npt.NDArray[np.intp], width: IntArray, height: IntArray) -> tuple[Bools, FloatArray]:
        aspect, bucket_aspect = self.aspect[at], width / height
        loss = aspect_loss(bucket_aspect, aspect)
        allowed = loss <= self.max_loss[at]
        if self.max_crop is not None:
            sides = (width * self.admissible.steps).astype(np.int32), (height * self.admissible.steps).astype(np.int32)
            resized = geometry.cover_resize(self.sizes[at, 0], self.sizes[at, 1], aspect, *sides, bucket_aspect)
            allowed &= geometry.crop_loss(*sides, *resized) <= self.max_crop
        return allowed, loss

    def _take(self, at: npt.NDArray[np.intp], width: IntArray, height: IntArray, loss: FloatArray) -> None:
        area = width.astype(np.int64) * height
        equal = area == self.best_area[at]
        better = (area > self.best_area[at]) | (equal & (loss <= self.best_loss[at] + _SLACK))
        at, steps = at[better], self.admissible.steps
        self.best_area[at], self.best_loss[at] = area[better], loss[better]
        self.best_sizes[at] = np.stack([width[better] * steps, height[better] * steps], axis=1)


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
