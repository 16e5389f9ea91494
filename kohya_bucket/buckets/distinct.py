"""The different bucket sizes among many rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.chunks import for_chunks
from kohya_bucket.buckets.types import BucketSet, IntArray

__all__ = ["distinct_sizes"]

_TABLE_CELLS = 1 << 22


def distinct_sizes(
    bucket_sizes: IntArray, placed: npt.NDArray[np.bool_], unit: int
) -> tuple[BucketSet | None, IntArray]:
    """The sizes that occur, sorted by (width, height), and each row's position among them; -1 where not `placed`.

    Every placed size is a multiple of `unit`, so the sizes fit into a small table, and a pass that marks
    what occurs with one that looks it up replace a sort of all rows.
    """
    n = len(placed)
    index = np.full(n, -1, dtype=np.int32)
    if not placed.any():
        return None, index
    columns, rows = int(bucket_sizes[:, 0].max()) // unit + 1, int(bucket_sizes[:, 1].max()) // unit + 1
    if columns * rows > _TABLE_CELLS + 4 * n:
        keys = bucket_sizes[:, 0].astype(np.int64) << 32 | bucket_sizes[:, 1]
        values, inverse = np.unique(keys[placed], return_inverse=True)
        index[placed] = inverse
        return BucketSet.from_dims(np.stack([values >> 32, values & 0xFFFFFFFF], axis=1).tolist()), index

    # Cell 0 stands for "no bucket": a placed size has no side 0.
    cells = np.empty(n, dtype=np.intp)
    occurs = np.zeros(columns * rows, dtype=np.bool_)

    def mark(start: int, stop: int) -> None:
        units, cell = bucket_sizes[start:stop] // unit, cells[start:stop]
        np.multiply(units[:, 0], rows, out=cell, dtype=np.intp)
        cell += units[:, 1]
        cell[~placed[start:stop]] = 0
        occurs[cell] = True

    for_chunks(n, mark)
    occurs[0] = False
    found = np.flatnonzero(occurs)
    position = np.full(len(occurs), -1, dtype=np.int32)
    position[found] = np.arange(len(found))

    def look_up(start: int, stop: int) -> None:
        np.take(position, cells[start:stop], out=index[start:stop])

    for_chunks(n, look_up)
    return BucketSet.from_dims((np.stack([found // rows, found % rows], axis=1) * unit).tolist()), index
