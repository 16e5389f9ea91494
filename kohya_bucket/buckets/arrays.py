"""Passes over large arrays: chunk by chunk on a few threads, and the different sizes among many rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.sizes import IntArray, size_keys, sizes_of_keys

__all__ = ["CHUNK_ROWS", "SizeGrid", "distinct_sizes", "for_chunks"]


CHUNK_ROWS = 16384
_MAX_THREADS = 4


def for_chunks(n: int, work: Callable[[int, int], None], chunk: int = CHUNK_ROWS) -> None:
    """Call `work(start, stop)` for consecutive ranges that cover `range(n)`."""
    starts = range(0, n, chunk)
    threads = min(_MAX_THREADS, os.cpu_count() or 1, len(starts) // 4)
    if threads < 2:
        for start in starts:
            work(start, min(start + chunk, n))
        return

    def stripe(t: int) -> None:
        for start in starts[t::threads]:
            work(start, min(start + chunk, n))

    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(stripe, t) for t in range(threads)]:
            done.result()


Cells = TypeVar("Cells", npt.NDArray[np.float64], npt.NDArray[np.int64])
_TABLE_CELLS = 1 << 22


class SizeGrid:
    """Cells of a table over all (width, height) that can occur, in units; marked while rows are placed.

    A pass that marks what occurs and one that looks it up replace a sort of all rows. Cell 0 stands for
    "no bucket": a placed size has no side 0.
    """

    def __init__(self, n: int, columns: int, rows: int, unit: int) -> None:
        self.rows = rows
        self._unit = unit
        self._cells = np.empty(n, dtype=np.intp)
        self._occurs = np.zeros(columns * rows, dtype=np.bool_)

    @staticmethod
    def fits(n: int, columns: int, rows: int) -> bool:
        """Whether a table of that many cells is worth it for `n` rows."""
        return columns * rows <= _TABLE_CELLS + 4 * n

    def cells(self, columns: Cells, rows: Cells, placed: npt.NDArray[np.bool_]) -> Cells:
        """The cells of sizes given in units; 0 where not `placed`."""
        cells = columns * self.rows
        cells += rows
        if not placed.all():
            cells *= placed
        return cells

    def mark(self, start: int, stop: int, cells: npt.NDArray[np.float64] | npt.NDArray[np.int64]) -> None:
        """Enter the cells of rows `start` to `stop`."""
        self._cells[start:stop] = cells
        self._occurs[self._cells[start:stop]] = True

    def result(self) -> tuple[BucketSet | None, IntArray]:
        """The sizes that occur, sorted by (width, height), and each row's position among them; -1 for none."""
        index = np.empty(len(self._cells), dtype=np.int32)
        self._occurs[:1] = False
        found = np.flatnonzero(self._occurs)
        position = np.full(len(self._occurs), -1, dtype=np.int32)
        position[found] = np.arange(len(found))

        def look_up(start: int, stop: int) -> None:
            np.take(position, self._cells[start:stop], out=index[start:stop])

        for_chunks(len(index), look_up)
        sizes = np.stack([found // self.rows, found % self.rows], axis=1) * self._unit
        return BucketSet.from_dims(sizes.tolist()) if len(found) else None, index


def distinct_sizes(
    bucket_sizes: IntArray, placed: npt.NDArray[np.bool_], unit: int
) -> tuple[BucketSet | None, IntArray]:
    """The sizes that occur, sorted by (width, height), and each row's position among them; -1 where not `placed`.

    Every placed size is a multiple of `unit` (knowing it saves time, no more).
    """
    n = len(placed)
    if not placed.any():
        return None, np.full(n, -1, dtype=np.int32)
    columns, rows = int(bucket_sizes[:, 0].max()) // unit + 1, int(bucket_sizes[:, 1].max()) // unit + 1
    if not SizeGrid.fits(n, columns, rows):
        index = np.full(n, -1, dtype=np.int32)
        values, inverse = np.unique(size_keys(bucket_sizes)[placed], return_inverse=True)
        index[placed] = inverse
        return BucketSet.from_dims(sizes_of_keys(values).tolist()), index

    table = SizeGrid(n, columns, rows, unit)

    def mark(start: int, stop: int) -> None:
        units = bucket_sizes[start:stop].astype(np.int64) // unit
        table.mark(start, stop, table.cells(units[:, 0], units[:, 1], placed[start:stop]))

    for_chunks(n, mark)
    return table.result()
