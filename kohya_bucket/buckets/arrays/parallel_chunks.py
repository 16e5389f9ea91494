"""Run a function over row ranges that fit the processor's cache, on a few threads.

numpy releases the interpreter lock in its loops, so ranges run side by side; each writes its own rows of
outputs that were allocated beforehand, so the result does not depend on the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["CHUNK_ROWS", "for_chunks"]

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
