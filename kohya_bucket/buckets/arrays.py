"""Passes over large arrays: chunk by chunk on a few threads, and the rows of many runs at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

_CHUNK_ROWS = 16384
_MAX_THREADS = 4


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


def pair_keys(first: npt.NDArray[np.integer], second: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """[N] one number for each pair, which sorts as the pairs do: numpy is many times faster with those."""
    return first.astype(np.int64) << 32 | second


def pairs_of(keys: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """([N], [N]): what `pair_keys` made numbers of."""
    return (keys >> 32).astype(np.int32), (keys & 0xFFFFFFFF).astype(np.int32)


def runs(lengths: npt.NDArray[np.integer], start: int | npt.NDArray[np.integer] = 0) -> npt.NDArray[np.int64]:
    """start, start + 1, ... for each run of these lengths, one run after another: [sum of lengths].

    Args:
        start: where each run begins: [N], or one number for all.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    count = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    count += np.repeat(start - ends + lengths, lengths)
    return count
