"""Opt-in limits on what a set's bucket may do to an image: enlarge it, or crop off more than a share.

A rule decides first; only images whose bucket breaks a limit are looked at again. They take, of the buckets
within the limits, the one that crops least (of equals the larger, then the first in set order).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays import for_chunks
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.rule import InSet, reasons_of
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.buckets.switching import AspectSwitch, nearest_indices
from kohya_bucket.checks import as_flag
from kohya_bucket.errors import BucketSettingsError


def check_max_crop(max_crop: float | None) -> float | None:
    """The value as float; `BucketSettingsError` where it is not a share: from 0 up to, not including, 1."""
    if max_crop is None or 0 <= float(max_crop) < 1:
        return None if max_crop is None else float(max_crop)
    raise BucketSettingsError(
        f"max_crop is {max_crop}, but is a share of the image: at least 0 and below 1, e.g. 0.05 for 5%"
    )


class Limits:
    """Limits over one bucket set; `apply` changes decisions in place."""

    def __init__(self, bucket_set: BucketSet, *, max_crop: float | None, no_upscale: bool) -> None:
        self.max_crop = check_max_crop(max_crop)
        self.no_upscale = as_flag("no_upscale", no_upscale, BucketSettingsError)
        self._set, self._most = bucket_set, 1.0 if self.max_crop is None else self.max_crop
        # Larger buckets first, so that the first of the smallest losses is the one wanted.
        self.candidates = sorted(range(len(bucket_set)), key=lambda k: -bucket_set[k].pixel_count)

    @property
    def active(self) -> bool:
        return self.max_crop is not None or self.no_upscale

    def apply(self, sizes: IntArray, index: IntArray, reasons: npt.NDArray[np.uint8]) -> None:
        """Move or remove the images that break a limit. `index` and `reasons` are [N] and written in place."""

        def work(start: int, stop: int) -> None:
            rows, at = sizes[start:stop], index[start:stop]
            checked = np.flatnonzero(at >= 0)
            loss, fits = self.judge(rows[checked], at[checked])
            broken = checked[~fits | (loss > self._most)]
            if len(broken):
                at[broken], reasons[start:stop][broken] = self._choose_again(rows[broken])

        for_chunks(len(sizes), work)

    def judge(self, sizes: IntArray, index: IntArray) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
        """[M] crop loss of each image in its bucket, and whether the bucket may be used for its size."""
        (width, height), (bucket_width, bucket_height) = sizes.T, self._set.sizes[index].T
        resized = geometry.cover_resize(
            width, height, width / height, bucket_width, bucket_height, self._set.aspects[index]
        )
        fits = np.ones(len(sizes), dtype=np.bool_)
        if self.no_upscale:
            fits = (bucket_width <= width) & (bucket_height <= height)
        loss = geometry.crop_loss(bucket_width, bucket_height, *resized)
        long = geometry.too_long(sizes, self._set.sizes, index)
        return (loss, fits) if long is None else (np.where(long, 1.0, loss), fits)

    def _choose_again(self, sizes: IntArray) -> tuple[IntArray, npt.NDArray[np.uint8]]:
        best_loss = np.full(len(sizes), np.inf)
        best = np.full(len(sizes), -1, dtype=np.int32)
        for k in self.candidates:
            loss, fits = self.judge(sizes, np.full(len(sizes), k, dtype=np.int32))
            better = fits & (loss < best_loss)
            best[better], best_loss[better] = k, loss[better]
        reasons = np.where(best >= 0, Reason.PLACED, Reason.NO_SMALLER_BUCKET).astype(np.uint8)
        too_much = (best >= 0) & (best_loss > self._most)
        best[too_much], reasons[too_much] = -1, Reason.CROP_LIMIT
        return best, reasons


def nearest_within(sizes: IntArray, bucket_set: BucketSet, switch: AspectSwitch, limits: Limits) -> InSet:
    """For each of [N, 2] sizes the nearest bucket within the limits."""
    index = nearest_indices(sizes, bucket_set, switch)
    if not limits.active:
        return InSet(sizes, bucket_set, index)
    reasons = reasons_of(index)
    limits.apply(sizes, index, reasons)
    return InSet(sizes, bucket_set, index, reasons)
