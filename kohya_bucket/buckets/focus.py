"""Crops that keep the subject: of all crops of the bucket's size, the one that keeps most of a rectangle.

A focus is a rectangle in shares of the picture: left, top, right and bottom from 0 to 1, of the picture as it is
trained. Trainers take pixels as stored, so that is without the turn that EXIF asks for; where a dataset turns images
upright (`obey_exif`), it is of the upright picture. A point is a rectangle without width and height.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.geometry import cut_pixels
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.texts import counted

BESIDE = "beside"  # in place of a file with rectangles: look beside each image
NO_FOCUS = (np.nan, np.nan, np.nan, np.nan)
_SHARES = 10**9  # shares are counted in billionths, so that what follows is exact in 64-bit integers
_TOLERANCE = 10**6  # a thousandth of a pixel beyond a border does not count


def focus_pixels(focus: FloatArray, sizes: IntArray) -> npt.NDArray[np.int64]:
    """The pixels that focus rectangles touch: [N, 4] left, top, right, bottom, 1 pixel wide and high or more.

    Args:
        focus: [N, 4] left, top, right, bottom in shares, 0 to 1.
        sizes: [N, 2] (width, height) of the pictures, 1 or more.
    """
    sides = np.asarray(sizes, dtype=np.int64)
    shares = np.rint(np.asarray(focus, dtype=np.float64) * _SHARES).astype(np.int64)
    before = (shares[:, :2] * sides + _TOLERANCE) // _SHARES
    after = -((-shares[:, 2:] * sides + _TOLERANCE) // _SHARES)
    # a point between two pixels, or a line, is as wide as the pixels on both sides of it
    thin = after <= before
    before, after = np.where(thin, after - 1, before), np.where(thin, before + 1, after)
    return np.concatenate([np.clip(before, 0, sides - 1), np.clip(after, 1, sides)], axis=1)


def focus_crops(rectangles: npt.NDArray[np.int64], resized_sizes: IntArray, bucket_sizes: IntArray) -> IntArray:
    """[N, 2] left and top of the crop that keeps most of each rectangle, and of those the nearest to the middle.

    The middle is where the crop is without a focus: an odd excess loses its extra pixel on the right or at the bottom.
    A mirrored rectangle has the mirrored crop. Only where an odd excess leaves the middle between two crops that both
    keep as much, both take the left or upper one, as without a focus.

    Args:
        rectangles: [N, 4] pixels of the resized images: left, top, right, bottom.
        resized_sizes, bucket_sizes: [N, 2] (width, height); each image covers its bucket.
    """
    bucket = np.asarray(bucket_sizes, dtype=np.int64)
    excess = np.maximum(np.asarray(resized_sizes, dtype=np.int64) - bucket, 0)
    # Each axis by itself: what is kept is a product of both. As much as can be is kept from `least` to `most`.
    first, last = rectangles[:, :2], rectangles[:, 2:] - bucket
    least, most = np.clip(np.minimum(first, last), 0, excess), np.clip(np.maximum(first, last), 0, excess)
    crops: IntArray = np.clip(excess // 2, least, most).astype(np.int32)
    return crops


def moved_crops(
    focus: FloatArray, resized_sizes: IntArray, bucket_sizes: IntArray, crop_ltrb: FloatArray
) -> tuple[IntArray, FloatArray]:
    """([N, 2] crops that keep each focus, [N, 4] the crop conditioning that goes with them).

    An image whose crop moves out of the middle has other crop conditioning for SDXL, too: what is really cut off at
    the left and at the top. Sd-scripts' own numbers, `crop_ltrb`, are those of the middle crop.
    """
    crops = focus_crops(focus_pixels(focus, resized_sizes), resized_sizes, bucket_sizes)
    moved = (crops != cut_pixels(resized_sizes, bucket_sizes)[:, :2]).any(axis=1)
    # Of the flipped image sd-scripts takes bucket width - right as the left side: that is what is cut off at the right.
    rest = bucket_sizes - (resized_sizes - bucket_sizes - crops)
    return crops, np.where(moved[:, None], np.concatenate([crops, rest], axis=1), crop_ltrb)


def focused(placement: Placement, focus: FloatArray | None) -> Placement:
    """The same placement, with the crops that keep the focus of each image.

    Args:
        focus: [N, 4] shares, NaN where an image has no focus; None: none has one.
    """
    at = np.flatnonzero(placement.placed & ~np.isnan(focus).any(axis=1)) if focus is not None else np.empty(0, np.intp)
    if focus is None or not len(at):
        return placement
    crops, ltrb = placement.cuts[:, :2], placement.crop_ltrb.copy()
    crops[at], ltrb[at] = moved_crops(focus[at], placement.resized_sizes[at], placement.bucket_sizes[at], ltrb[at])
    return replace(placement, crops=crops, crop_ltrb=ltrb)


def cut_rectangles(placement: Placement, focus: FloatArray) -> FloatArray:
    """[N] share of each rectangle's pixels that the crop cuts off; NaN without a bucket or a focus."""
    out = np.full(len(placement), np.nan)
    at = np.flatnonzero(placement.placed & ~np.isnan(focus).any(axis=1))
    rectangles = focus_pixels(focus[at], placement.resized_sizes[at])
    left_top = placement.cuts[at, :2].astype(np.int64)
    right_bottom = left_top + placement.bucket_sizes[at]
    kept = np.minimum(rectangles[:, 2:], right_bottom) - np.maximum(rectangles[:, :2], left_top)
    whole = (rectangles[:, 2:] - rectangles[:, :2]).prod(axis=1)
    out[at] = 1 - np.maximum(kept, 0).prod(axis=1) / whole
    return out


def middle_cuts(placement: Placement, focus: FloatArray) -> FloatArray:
    """[N] the same of the middle crop."""
    return cut_rectangles(replace(placement, crops=None), focus)


class FocusCuts(NamedTuple):
    """Of how many rectangles of placed images a part is cut off."""

    rectangles: int
    cut_in_middle: int
    cut: int

    @classmethod
    def from_placement(cls, placement: Placement, focus: FloatArray) -> FocusCuts:
        """With the crops of a placement, and without a focus: in the middle."""
        middle, now = middle_cuts(placement, focus), cut_rectangles(placement, focus)
        return cls(*(int(np.sum(one)) for one in (~np.isnan(now), middle > 0, now > 0)))

    def __str__(self) -> str:
        middle = f"the middle would cut {self.cut_in_middle:,}, these crops cut {self.cut:,}"
        return f"focus: {counted(self.rectangles, 'rectangle')}; {middle}"
