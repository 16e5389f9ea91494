"""No-upscale mode: an image's bucket is its own size, reduced to the area if it is larger, floored to the step.

Source: kohya-ss/sd-scripts, `BucketManager.select_bucket` with `no_upscale`, unchanged from 0.8.7 to 0.10.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.arrays.build_placement import Outputs
from kohya_bucket.buckets.arrays.distinct_sizes import SizeGrid, distinct_sizes
from kohya_bucket.buckets.arrays.parallel_chunks import for_chunks
from kohya_bucket.buckets.no_upscale.by_aspect import ByAspect, grid_side
from kohya_bucket.buckets.no_upscale.reduced import Reduced, whole_steps
from kohya_bucket.buckets.placement import Placement, Reason
from kohya_bucket.buckets.sizes import FloatArray, IntArray

__all__ = ["WithoutUpscaling", "indices_without_upscaling", "place_without_upscaling"]

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
