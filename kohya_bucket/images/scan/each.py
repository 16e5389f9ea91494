"""The same to each of some things side by side: large files, such as tars, or many small requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kohya_bucket.images.progress import Progress, go_on, until
from kohya_bucket.images.scan.pool import Engine

__all__ = ["for_each", "for_many"]

A = TypeVar("A")
B = TypeVar("B")
_AT_ONCE = 8  # each may hold some megabytes
_REQUESTS = 16
_WAITING = 4096


def for_each(
    function: Callable[[A], B], items: Sequence[A], engine: Engine = "auto", progress: Progress | None = None
) -> list[B]:
    """What `function` gives for each item, of which there are few, in their order; raises what it raises.

    Args:
        function: calls `go_on` from time to time where it takes long.
        engine: "ray" for a cluster; else threads.
        progress: called as `progress(done, total)`.
    """
    if engine == "ray":
        from kohya_bucket.images.scan.ray_pool import each_on_ray

        return each_on_ray(function, items, progress)
    out: list[B] = []
    stopped = threading.Event()

    def one(item: A) -> B:
        until(stopped)
        go_on()
        return function(item)

    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(items))), "kohya-bucket-scan") as pool:
        try:
            for result in pool.map(one, items):
                out.append(result)
                if progress is not None:
                    progress(len(out), len(items))
        except BaseException:
            stopped.set()
            raise
    return out


def for_many(function: Callable[[A], B], items: Sequence[A]) -> list[B]:
    """What `function` gives for each item, in their order, where each waits for a disk or a server.

    However many items there are, a few thousand wait at a time.
    """
    out: list[B] = []
    with ThreadPoolExecutor(_REQUESTS, "kohya-bucket-request") as pool:
        for start in range(0, len(items), _WAITING):
            out += pool.map(function, items[start : start + _WAITING])
    return out
