"""What becomes of images above the area: scaled to it, either side floored to the step."""

from __future__ import annotations

import numpy as np

from kohya_bucket.buckets.arrays.distinct_sizes import SizeGrid
from kohya_bucket.buckets.sizes import FloatArray

__all__ = ["Reduced", "whole_steps"]


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
