"""The same to each of a few large files, such as tars: side by side, on threads or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from kohya_bucket.images.progress import Progress
from kohya_bucket.images.scan.pool import Engine

__all__ = ["for_each"]

A = TypeVar("A")
B = TypeVar("B")
_AT_ONCE = 8  # each may hold some megabytes


def for_each(
    function: Callable[[A], B], items: Sequence[A], engine: Engine = "auto", progress: Progress | None = None
) -> list[B]:
    """What `function` gives for each item, in their order; raises what it raises.

    Args:
        engine: "ray" for a cluster; else threads.
        progress: called as `progress(done, total)`.
    """
    if engine == "ray":
        from kohya_bucket.images.scan.ray_pool import each_on_ray

        return each_on_ray(function, items, progress)
    out: list[B] = []
    with ThreadPoolExecutor(max(1, min(_AT_ONCE, len(items))), "kohya-bucket-scan") as pool:
        try:
            for result in pool.map(function, items):
                out.append(result)
                if progress is not None:
                    progress(len(out), len(items))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return out
