"""Buckets without enlarging: the image's own size, reduced to the area, floored to the step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays import SizeGrid, distinct_sizes, for_chunks
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.rule import Outputs
from kohya_bucket.buckets.sizes import FloatArray, IntArray

__all__ = [
    "ByAspect",
    "Reduced",
    "WithoutUpscaling",
    "grid_side",
    "indices_without_upscaling",
    "place_without_upscaling",
    "whole_steps",
]


Rows = npt.NDArray[np.bool_]
_WORTH_A_TABLE = 50_000  # images


@dataclass(frozen=True)
class WithoutUpscaling:
    """Each image's bucket is its own size, reduced to the area, floored to the step."""

    sizes: IntArray
    max_area: int
    steps: int

    def indices(self) -> IntArray:
        return indices_without_upscaling(self.sizes, self.max_area, self.steps)

    def placement(self) -> Placement:
        return place_without_upscaling(self.sizes, self.max_area, self.steps)


def place_without_upscaling(sizes: IntArray, max_area: int, reso_steps: int) -> Placement:
    """Place [N, 2] int32 sizes in no-upscale mode: the bucket is the (reduced) size floored to the step."""
    n = len(sizes)
    bucket_sizes, resized_sizes = np.empty((n, 2), dtype=np.int32), np.empty((n, 2), dtype=np.int32)
    reasons = np.empty(n, dtype=np.uint8)
    out = Outputs(n)
    grid = _grid(n, max_area, reso_steps)
    by_aspect = ByAspect.of(max_area, reso_steps) if grid is not None and n >= _WORTH_A_TABLE else None

    def work(start: int, stop: int) -> None:
        rows = sizes[start:stop]
        width, height, aspect, reasons[start:stop] = _resize(rows, max_area, reso_steps, by_aspect)
        bucket_width, bucket_height = (whole_steps(side, reso_steps) for side in (width, height))
        if grid is not None:
            grid.mark(start, stop, grid.cells(bucket_width, bucket_height, reasons[start:stop] == Reason.PLACED))
        bucket_width *= reso_steps
        bucket_height *= reso_steps
        resized_sizes[start:stop, 0], resized_sizes[start:stop, 1] = width, height
        bucket_sizes[start:stop, 0], bucket_sizes[start:stop, 1] = bucket_width, bucket_height
        missing = reasons[start:stop] != Reason.PLACED
        any_missing = bool(missing.any())
        if any_missing:
            for column in (width, height, bucket_width, bucket_height):
                column[missing] = 1
        bucket_aspect = bucket_width / bucket_height
        out.fill(start, stop, (bucket_width, bucket_height), bucket_aspect, aspect, (width, height))
        if any_missing:
            bucket_sizes[start:stop][missing] = resized_sizes[start:stop][missing] = 0
            out.clear(start, stop, missing)

    for_chunks(n, work)
    if grid is not None:
        bucket_set, index = grid.result()
    else:
        bucket_set, index = distinct_sizes(bucket_sizes, reasons == Reason.PLACED, reso_steps)
    return out.placement(bucket_set, index, bucket_sizes, resized_sizes, reasons)


def indices_without_upscaling(sizes: IntArray, max_area: int, reso_steps: int) -> IntArray:
    """Only `bucket_index` of `place_without_upscaling`."""
    n = len(sizes)
    grid = _grid(n, max_area, reso_steps)
    if grid is None:
        return place_without_upscaling(sizes, max_area, reso_steps).bucket_index
    by_aspect = ByAspect.of(max_area, reso_steps) if n >= _WORTH_A_TABLE else None

    def work(start: int, stop: int) -> None:
        width, height, aspect, too_large, unreadable = _shapes(sizes[start:stop], max_area)
        placed = np.minimum(width, height) >= reso_steps
        if unreadable is not None:
            placed &= ~unreadable
        cells = grid.cells(whole_steps(width, reso_steps), whole_steps(height, reso_steps), placed)
        if too_large is not None:
            if by_aspect is None:
                reduced = Reduced(aspect, max_area, reso_steps).cells(grid)
            else:
                reduced = by_aspect.cells(aspect, too_large)
            np.copyto(cells, reduced, where=too_large)
        grid.mark(start, stop, cells)

    for_chunks(n, work)
    return grid.result()[1]


def _grid(n: int, max_area: int, steps: int) -> SizeGrid | None:
    """A table for the no-upscale buckets of `n` images; None where it would be too large."""
    side = grid_side(max_area, steps)
    return SizeGrid(n, side, side, steps) if SizeGrid.fits(n, side, side) else None


def _resize(
    sizes: IntArray, max_area: int, steps: int, by_aspect: ByAspect | None
) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.uint8]]:
    """What no-upscale mode scales each image to: widths, heights (0 where unreadable), image aspects, reasons."""
    width, height, aspect, too_large, unreadable = _shapes(sizes, max_area)
    if too_large is not None:
        if by_aspect is None:
            computed = Reduced(aspect, max_area, steps)
            reduced = computed.width, computed.height
        else:
            reduced = by_aspect.sizes(aspect, too_large)
        np.copyto(width, reduced[0], where=too_large)
        np.copyto(height, reduced[1], where=too_large)
    reasons = np.where(np.minimum(width, height) < steps, np.uint8(Reason.TOO_SMALL), np.uint8(Reason.PLACED))
    if unreadable is not None:
        width[unreadable] = height[unreadable] = 0
        reasons[unreadable] = Reason.UNREADABLE
    return width, height, aspect, reasons


def _shapes(sizes: IntArray, max_area: int) -> tuple[FloatArray, FloatArray, FloatArray, Rows | None, Rows | None]:
    """Widths, heights, aspects, and which rows are above the area and which unreadable (1x1 here); None for none."""
    width, height = sizes[:, 0].astype(np.float64), sizes[:, 1].astype(np.float64)
    unreadable = np.minimum(width, height) < 1
    some_unreadable = bool(unreadable.any())
    if some_unreadable:
        width[unreadable] = height[unreadable] = 1
    too_large = width * height > max_area
    some_large = bool(too_large.any())
    return width, height, width / height, too_large if some_large else None, unreadable if some_unreadable else None


def whole_steps(x: FloatArray, steps: int) -> FloatArray:
    """How many whole steps are in x >= 0, as doubles: exact below 2**53, and much faster than integers."""
    # For a power of two multiplying by the inverse is exact as well.
    out = x * (1 / steps) if steps & (steps - 1) == 0 else x / steps
    return np.floor(out, out=out)


def _floor_to_multiple(x: FloatArray, steps: int) -> FloatArray:
    """Whole multiples of `steps` at or below x >= 0."""
    out = whole_steps(x, steps)
    out *= steps
    return out


class Reduced:
    """Images scaled to the area: either side floored to the step, of the two the one with less aspect error."""

    def __init__(self, aspect: FloatArray, max_area: int, steps: int) -> None:
        def floor_to_steps(x: FloatArray) -> FloatArray:
            whole = x + 0.5
            return _floor_to_multiple(np.floor(whole, out=whole), steps)

        ideal_width = np.sqrt(max_area * aspect)
        self._steps = steps
        self._by_width = floor_to_steps(ideal_width)
        self._by_height = floor_to_steps(max_area / ideal_width)
        self._height_exact, self._width_exact = self._by_width / aspect, self._by_height * aspect
        self._height_of_width = floor_to_steps(self._height_exact)
        self._width_of_height = floor_to_steps(self._width_exact)
        # A candidate that floors to 0 ends as a division by zero in sd-scripts, whichever candidate it is.
        dead = np.minimum(self._height_of_width, self._by_height) == 0
        self._dead = dead if dead.any() else None
        if self._dead is not None:
            self._height_of_width[dead] = self._by_height[dead] = 1
        error_by_width = np.abs(self._by_width / self._height_of_width - aspect)
        self._take_width = error_by_width < np.abs(self._width_of_height / self._by_height - aspect)

    @property
    def width(self) -> FloatArray:
        return self._choose(self._by_width, np.floor(self._width_exact + 0.5))

    @property
    def height(self) -> FloatArray:
        return self._choose(np.floor(self._height_exact + 0.5), self._by_height)

    def floored_sides(self) -> tuple[FloatArray, FloatArray]:
        """The side that was floored to the step first, as a width or as a height; the other is 0, and both if dead."""
        zero = np.zeros_like(self._by_width)
        return self._choose(self._by_width, zero), self._choose(zero, self._by_height)

    def cells(self, grid: SizeGrid) -> FloatArray:
        """Cells of the buckets: `width` and `height`, floored to the step."""
        columns = whole_steps(self._choose(self._by_width, self._width_of_height), self._steps)
        rows = whole_steps(self._choose(self._height_of_width, self._by_height), self._steps)
        return grid.cells(columns, rows, np.minimum(columns, rows) >= 1)

    def signature(self) -> FloatArray:
        """[6, N] all that the bucket is made from; each row rises or falls with the aspect while those above are equal.

        The last tells which candidate is nearer: the aspects of the two are the same numbers wherever the rows
        above are equal, and the distance to one grows where that to the other shrinks.
        """
        dead = np.zeros(len(self._by_width)) if self._dead is None else self._dead
        candidates = self._by_width, self._by_height, self._height_of_width, self._width_of_height
        return np.stack([dead, *candidates, self._take_width])

    def _choose(self, by_width: FloatArray, by_height: FloatArray) -> FloatArray:
        out = np.where(self._take_width, by_width, by_height)
        if self._dead is not None:
            out[self._dead] = 0
        return out


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
