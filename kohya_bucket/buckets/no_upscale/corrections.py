"""Opt-in corrections of sd-scripts' no-upscale buckets: the largest fit, and a bound on what is cropped."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays.parallel_chunks import for_chunks
from kohya_bucket.buckets.decision import OwnSizes
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.buckets.no_upscale.largest_fit import Admissible, largest_sizes, least_crop_sizes
from kohya_bucket.buckets.no_upscale.place import place_without_upscaling
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.sizes import IntArray

__all__ = ["corrected_without_upscaling"]

Reasons = npt.NDArray[np.uint8]


def corrected_without_upscaling(
    sizes: IntArray, max_area: int, steps: int, largest: bool, max_crop: float | None
) -> OwnSizes:
    """Kohya's no-upscale buckets of [N, 2] sizes, corrected.

    With `largest`, each image takes the largest admissible size that crops no larger share than Kohya's bucket
    would, so no image keeps less area than before. Where Kohya's rule has no bucket, it takes the size that
    crops least. An image over `max_crop` takes the largest size within it, or none (`Reason.CROP_LIMIT`).
    """
    plain = place_without_upscaling(sizes, max_area, steps)
    bucket_sizes, resized, reasons = plain.bucket_sizes, plain.resized_sizes, plain.reasons
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
