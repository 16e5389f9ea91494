"""Passes over large arrays: chunk by chunk on a few threads, and the different sizes among many rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.sizes import IntArray, size_keys, sizes_of_keys

_CHUNK_ROWS = 16384
_MAX_THREADS = 4
_TABLE_CELLS = 1 << 22


def for_chunks(n: int, work: Callable[[int, int], None]) -> None:
    """Call `work(start, stop)` for consecutive ranges that cover `range(n)` and fit the processor's cache.

    numpy releases the interpreter lock in its loops, so ranges run side by side on a few threads; each writes its own
    rows of outputs that were allocated beforehand, so the result does not depend on the number of threads.
    """
    starts = range(0, n, _CHUNK_ROWS)
    threads = max(1, min(_MAX_THREADS, os.cpu_count() or 1, len(starts) // 4))

    def stripe(t: int) -> None:
        for start in starts[t::threads]:
            work(start, min(start + _CHUNK_ROWS, n))

    if threads == 1:
        stripe(0)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(stripe, range(threads)))


def runs(lengths: npt.NDArray[np.integer], start: int | npt.NDArray[np.integer] = 0) -> npt.NDArray[np.int64]:
    """start, start + 1, ... for each run of these lengths, one run after another: [sum of lengths].

    Args:
        start: where each run begins: [N], or one number for all.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    count = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    count += np.repeat(start - ends + lengths, lengths)
    return count


def distinct_sizes(
    bucket_sizes: IntArray, placed: npt.NDArray[np.bool_], unit: int
) -> tuple[BucketSet | None, IntArray]:
    """The sizes that occur, sorted by (width, height), and each row's position among them; -1 where not `placed`.

    Every placed size is a multiple of `unit`; knowing it only saves time.
    """
    index = np.full(len(placed), -1, dtype=np.int32)
    if not placed.any():
        return None, index
    columns, rows = (int(side.max()) // unit + 1 for side in bucket_sizes.T)
    if columns * rows > _TABLE_CELLS + 4 * len(placed):
        keys, index[placed] = np.unique(size_keys(bucket_sizes)[placed], return_inverse=True)
        return BucketSet.from_dims(sizes_of_keys(keys).tolist()), index
    # A table over all sizes takes a fraction of the time of that sort. Its cell 0 stands for "no bucket".
    cells = (bucket_sizes[:, 0] // unit * rows + bucket_sizes[:, 1] // unit) * placed
    position = np.full(columns * rows, -1, dtype=np.int32)
    position[cells[placed]] = 0
    found = np.flatnonzero(position == 0)
    position[found] = np.arange(len(found))
    return BucketSet.from_dims((np.stack([found // rows, found % rows], axis=1) * unit).tolist()), position[cells]
