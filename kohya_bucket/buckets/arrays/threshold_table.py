"""Counting the thresholds below a number without a search."""

from __future__ import annotations

import numpy as np

from kohya_bucket.buckets.sizes import FloatArray, IntArray

__all__ = ["ThresholdTable"]

_MOST_CELLS = 1 << 14


class ThresholdTable:
    """`searchsorted(thresholds, a, side="right")` by a table over the leading bits of a double.

    A positive double's bit pattern orders like its value. The patterns are cut into cells so narrow that none
    holds two thresholds: the table says how many lie below the cell, one comparison settles the rest.
    """

    def __init__(self, shift: int, first: int, below: IntArray, thresholds: FloatArray) -> None:
        self.shift, self.first, self.below = shift, first, below
        self.thresholds = np.append(thresholds, np.inf)

    @classmethod
    def build(cls, thresholds: FloatArray) -> ThresholdTable | None:
        """None where the thresholds are too close or too far apart for a small table."""
        if not len(thresholds) or thresholds[0] <= 0 or not np.isfinite(thresholds[-1]):
            return None
        bits = thresholds.view(np.int64)
        for shift in range(49, 39, -1):
            cells = bits >> shift
            if np.all(cells[1:] > cells[:-1]):
                first, last = int(cells[0]) - 1, int(cells[-1]) + 1
                if last - first > _MOST_CELLS:
                    return None
                below = np.searchsorted(cells, np.arange(first, last + 1), side="left").astype(np.int32)
                return cls(shift, first, below, thresholds)
        return None

    def steps(self, aspect: FloatArray) -> IntArray:
        """[N] positive doubles -> [N] int32, how many thresholds are at or below each."""
        cell = (aspect.view(np.int64) >> self.shift) - self.first
        count = self.below.take(cell, mode="clip")
        count += aspect >= self.thresholds.take(count)
        return count
