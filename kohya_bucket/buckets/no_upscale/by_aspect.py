"""The sizes of images above the area, looked up by their aspect."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays.distinct_sizes import SizeGrid
from kohya_bucket.buckets.no_upscale.reduced import Reduced
from kohya_bucket.buckets.sizes import FloatArray

__all__ = ["ByAspect", "grid_side"]

_ASPECTS = 2.0**-9, 2.0**9
_SHIFT = 42  # ranges of aspects, 1024 to a doubling


class ByAspect:
    """What becomes of images above the area, which follows from their aspect, looked up by the leading bits of it.

    A positive double's bit pattern orders like its value, and every step from the aspect to the bucket is a
    monotone function, in float arithmetic too (`Reduced.signature`). So where all of them are equal at both ends
    of a range of patterns, they are equal within it. Images in other ranges are computed one by one.
    """

    def __init__(self, max_area: int, steps: int, side: int) -> None:
        self._max_area, self._steps = max_area, steps
        self._grid = SizeGrid(0, side, side, steps)
        first, last = (int(np.float64(aspect).view(np.int64) >> _SHIFT) for aspect in _ASPECTS)
        self._first = first
        edges = np.arange(first, last + 1) << _SHIFT
        low, high = (Reduced(bits.view(np.float64), max_area, steps) for bits in (edges, edges + ((1 << _SHIFT) - 1)))
        constant = (low.signature() == high.signature()).all(axis=0)
        # The outermost ranges stand for all beyond them.
        constant[[0, -1]] = False
        self._cells = np.where(constant, low.cells(self._grid), -1.0)
        self._widths, self._heights = (np.where(constant, side, 0.0) for side in low.floored_sides())

    @staticmethod
    @lru_cache(maxsize=8)
    def of(max_area: int, steps: int) -> ByAspect:
        """Made once for each setting."""
        return ByAspect(max_area, steps, grid_side(max_area, steps))

    def cells(self, aspect: FloatArray, wanted: npt.NDArray[np.bool_]) -> FloatArray:
        """The grid cells of the buckets of [N] aspects; where not `wanted`, anything."""
        cells = self._cells.take(self._ranges(aspect), mode="clip")
        open_ = np.flatnonzero((cells < 0) & wanted)
        if len(open_):
            cells[open_] = Reduced(aspect[open_], self._max_area, self._steps).cells(self._grid)
        return cells

    def sizes(self, aspect: FloatArray, wanted: npt.NDArray[np.bool_]) -> tuple[FloatArray, FloatArray]:
        """The widths and heights that images of [N] aspects are scaled to; where not `wanted`, anything."""
        at = self._ranges(aspect)
        by_width, by_height = self._widths.take(at, mode="clip"), self._heights.take(at, mode="clip")
        # One of the two is 0, and so is what follows from it.
        width, height = by_width + np.floor(by_height * aspect + 0.5), by_height + np.floor(by_width / aspect + 0.5)
        open_ = np.flatnonzero((self._cells.take(at, mode="clip") < 0) & wanted)
        if len(open_):
            computed = Reduced(aspect[open_], self._max_area, self._steps)
            width[open_], height[open_] = computed.width, computed.height
        return width, height

    def _ranges(self, aspect: FloatArray) -> npt.NDArray[np.int64]:
        return (aspect.view(np.int64) >> _SHIFT) - self._first


def grid_side(max_area: int, steps: int) -> int:
    """One more than any side of a no-upscale bucket, in steps.

    A side is bounded by the other, which is a step at least: an image within the area is no longer than
    area / step. A reduced one was rounded by half a pixel on each side and, through the aspect, once more.
    """
    short = steps - 0.5
    return int(max_area / short * (1 + 0.5 / short) / steps) + 3
