"""From a decided bucket per image to a full `Placement`: shared by every rule."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.arrays.distinct_sizes import distinct_sizes
from kohya_bucket.buckets.arrays.parallel_chunks import for_chunks
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.sizes import FloatArray, IntArray

__all__ = ["Outputs", "place_from_data", "place_into_set"]


def place_into_set(
    sizes: IntArray,
    bucket_set: BucketSet,
    index: IntArray,
    reasons: npt.NDArray[np.uint8] | None = None,
) -> Placement:
    """Placement of images into a known set, scaled to cover their bucket.

    Args:
        sizes: [N, 2] int32 (width, height).
        index: [N] int32 position in `bucket_set`, -1 for none.
        reasons: [N] uint8 `Reason` values; if None, every image without a bucket counts as unreadable.
    """
    if reasons is None:
        reasons = np.where(index >= 0, Reason.PLACED, Reason.UNREADABLE).astype(np.uint8)
    bucket_sizes = np.empty((len(sizes), 2), dtype=np.int32)
    resized_sizes = np.empty((len(sizes), 2), dtype=np.int32)
    out = Outputs(len(sizes))
    # Columns of doubles, so that no loop over images converts or strides.
    bucket_widths, bucket_heights = (np.ascontiguousarray(side, dtype=np.float64) for side in bucket_set.sizes.T)

    def work(start: int, stop: int) -> None:
        at = index[start:stop]
        width, height = (sizes[start:stop, side].astype(np.float64) for side in (0, 1))
        missing = at < 0
        any_missing = bool(missing.any())
        if any_missing:
            at = np.where(missing, 0, at)
            width[missing] = height[missing] = 1
        bucket_width, bucket_height = bucket_widths[at], bucket_heights[at]
        bucket_aspect, aspect = bucket_set.aspects[at], width / height
        resized = geometry.cover_resize(width, height, aspect, bucket_width, bucket_height, bucket_aspect)
        bucket_sizes[start:stop, 0], bucket_sizes[start:stop, 1] = bucket_width, bucket_height
        resized_sizes[start:stop, 0], resized_sizes[start:stop, 1] = resized
        out.fill(start, stop, (bucket_width, bucket_height), bucket_aspect, aspect, resized)
        if any_missing:
            bucket_sizes[start:stop][missing] = 0
            resized_sizes[start:stop][missing] = 0
            out.clear(start, stop, missing)

    for_chunks(len(sizes), work)
    return out.placement(bucket_set, index, bucket_sizes, resized_sizes, reasons)


def place_from_data(
    sizes: IntArray, bucket_sizes: IntArray, resized_sizes: IntArray | None, reasons: npt.NDArray[np.uint8],
    unit: int = 1,
) -> Placement:  # fmt: skip
    """Placement where each image brings its bucket; the set is what occurs, sorted by (width, height).

    All arrays have N rows; rows whose reason is not `PLACED` lose their bucket. Without `resized_sizes` images are
    scaled until they cover it. Every bucket side is a multiple of `unit` (knowing it saves time, no more).
    """
    placed = reasons == Reason.PLACED
    bucket_set, index = distinct_sizes(bucket_sizes, placed, unit)
    out = Outputs(len(sizes))
    resized = np.empty_like(sizes) if resized_sizes is None else resized_sizes

    def work(start: int, stop: int) -> None:
        missing = ~placed[start:stop]
        any_missing = bool(missing.any())
        if resized_sizes is None:
            resized[start:stop] = geometry.covering_sizes(sizes[start:stop], bucket_sizes[start:stop])
        parts = sizes[start:stop], bucket_sizes[start:stop], resized[start:stop]
        columns = [part[:, side].astype(np.float64) for part in parts for side in (0, 1)]
        if any_missing:
            for column in columns:
                column[missing] = 1
        width, height, bucket_width, bucket_height, resized_width, resized_height = columns
        bucket = bucket_width, bucket_height
        out.fill(start, stop, bucket, bucket_width / bucket_height, width / height, (resized_width, resized_height))
        if any_missing:
            out.clear(start, stop, missing)

    for_chunks(len(sizes), work)
    if not placed.all():
        bucket_sizes = np.where(placed[:, None], bucket_sizes, 0).astype(np.int32)
        resized = np.where(placed[:, None], resized, 0).astype(np.int32)
    return out.placement(bucket_set, index, bucket_sizes, resized, reasons)


class Outputs:
    """Rows that every placement computes alike, allocated once and filled range by range."""

    def __init__(self, n: int) -> None:
        self.crop_ltrb = np.empty((n, 4), dtype=np.float64)
        self.aspect_errors = np.empty(n, dtype=np.float64)
        self.crop_loss = np.empty(n, dtype=np.float64)

    def fill(
        self, start: int, stop: int, bucket: tuple[FloatArray, FloatArray], bucket_aspect: FloatArray,
        aspect: FloatArray, resized: tuple[geometry.Sides, geometry.Sides],
    ) -> None:  # fmt: skip
        """Rows `start` to `stop`, from columns of widths and heights."""
        geometry.crop_ltrb(*bucket, bucket_aspect, aspect, out=self.crop_ltrb[start:stop])
        np.subtract(bucket_aspect, aspect, out=self.aspect_errors[start:stop])
        self.crop_loss[start:stop] = geometry.crop_loss(*bucket, *resized)

    def clear(self, start: int, stop: int, missing: npt.NDArray[np.bool_]) -> None:
        """Empty those of the rows that have no bucket."""
        self.crop_ltrb[start:stop][missing] = 0
        self.aspect_errors[start:stop][missing] = np.nan
        self.crop_loss[start:stop][missing] = np.nan

    def placement(
        self, bucket_set: BucketSet | None, index: IntArray, bucket_sizes: IntArray, resized_sizes: IntArray,
        reasons: npt.NDArray[np.uint8],
    ) -> Placement:  # fmt: skip
        """Together with what is decided."""
        computed = self.crop_ltrb, self.aspect_errors, self.crop_loss
        return Placement(bucket_set, index, bucket_sizes, resized_sizes, *computed, reasons)
