"""Resize, crop and crop loss, as pure functions on arrays of sizes (width, height).

Wherever sd-scripts computes in floats, the same operations stand here in the same order, so that results
are equal and not merely close (`BucketManager.select_bucket` and `get_crop_ltrb`, 0.8.7 to 0.10.1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import FloatArray, IntArray

# Whole numbers of pixels; doubles where a caller already has them, which saves the conversion.
Sides = IntArray | FloatArray
_MOST = 2**31 - 1


def round_half_up(x: FloatArray) -> IntArray:
    """`int(x + 0.5)` for non-negative x, as sd-scripts rounds. [N] float64 -> [N] int32."""
    with np.errstate(invalid="ignore"):  # what 32 bits do not hold is for `too_long` to find
        return (x + 0.5).astype(np.int32)


def cover_resize(
    width: Sides, height: Sides, aspect: FloatArray,
    bucket_width: Sides, bucket_height: Sides, bucket_aspect: FloatArray,
) -> tuple[IntArray, IntArray]:  # fmt: skip
    """Scale each image until it covers its bucket: wider images match heights, others widths.

    All arguments are [N]; returns the resized widths and heights, [N] int32 pixels.
    """
    wider = aspect > bucket_aspect
    scale = np.where(wider, bucket_height, bucket_width) / np.where(wider, height, width)
    return round_half_up(width * scale), round_half_up(height * scale)


def too_long(sizes: IntArray, bucket_sizes: IntArray, index: IntArray | None = None) -> npt.NDArray[np.bool_] | None:
    """[N] bool: scaled to cover its bucket, the image has a side beyond 32 bits. None where none has.

    Args:
        sizes: [N, 2] (width, height) of the images.
        bucket_sizes: [N, 2] a bucket for each image; or with `index` [K, 2] buckets.
        index: [N] positions in `bucket_sizes`, -1 for none.
    """
    if not len(sizes) or int(sizes.max()) * int(bucket_sizes.max(initial=0)) <= _MOST:
        return None  # no image that has been seen needs more than this look
    rows = bucket_sizes if index is None else bucket_sizes[index]
    placed = (np.minimum(sizes, rows) > 0).all(axis=1) & (True if index is None else index >= 0)
    image, bucket = (np.where(placed[:, None], part, 1).astype(np.float64) for part in (sizes, rows))
    scale = (bucket / image).max(axis=1)
    long = placed & ((image * scale[:, None]).max(axis=1) + 1 > _MOST)
    return long if long.any() else None


def covering_sizes(sizes: IntArray, buckets: IntArray) -> IntArray:
    """[N, 2] int32: sizes of 1 or more scaled until they cover their buckets; 0 where a bucket has a side of 0."""
    (width, height), (bucket_width, bucket_height) = sizes.T.astype(np.float64), np.maximum(buckets, 1).T.astype(float)
    resized = cover_resize(width, height, width / height, bucket_width, bucket_height, bucket_width / bucket_height)
    out: IntArray = np.stack(resized, axis=1)
    out[buckets.min(axis=1, initial=1) < 1] = 0
    return out


def crop_ltrb(bucket_width: Sides, bucket_height: Sides, bucket_aspect: FloatArray, aspect: FloatArray) -> FloatArray:
    """The crop conditioning that sd-scripts gives to SDXL: [N, 4] float64 left, top, right, bottom.

    It follows Stability AI's preprocessing as sd-scripts restates it: the image fitted *inside* the
    bucket, whatever crop is really done.
    """
    fit_height = bucket_aspect > aspect
    width = np.where(fit_height, bucket_height * aspect, bucket_width)
    height = np.where(fit_height, bucket_height, bucket_width / aspect)
    # Halving a double is exact, so this is Python's `// 2` to the bit, and 20 times faster than numpy's.
    left, top = np.floor((bucket_width - width) * 0.5), np.floor((bucket_height - height) * 0.5)
    return np.stack([left, top, left + width, top + height], axis=1)


def crop_loss(bucket_width: Sides, bucket_height: Sides, resized_width: Sides, resized_height: Sides) -> FloatArray:
    """Share of the resized image's pixels outside the bucket, [N] float64 in [0, 1)."""
    kept = bucket_width.astype(np.float64) * bucket_height
    return np.asarray(1.0 - kept / (resized_width.astype(np.float64) * resized_height))


def cut_pixels(resized_sizes: IntArray, bucket_sizes: IntArray, crops: IntArray | None = None) -> IntArray:
    """Pixels of the resized image cut off by the crop: [N, 4] left, top, right, bottom.

    `crops` is [N, 2] left and top; None is the middle, where an odd excess loses its extra pixel on the right or at
    the bottom, as in sd-scripts.
    """
    excess = np.maximum(resized_sizes - bucket_sizes, 0)
    before = excess // 2 if crops is None else crops
    return np.concatenate([before, excess - before], axis=1)


def aspect_loss(bucket_aspect: FloatArray, aspect: FloatArray) -> FloatArray:
    """Share of an image cut off when it is scaled to cover a bucket, before any rounding to pixels. [N]."""
    return np.asarray(1.0 - np.minimum(bucket_aspect / aspect, aspect / bucket_aspect))
