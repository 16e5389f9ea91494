"""A function applied to many items in parallel, on threads or on a Ray cluster, with progress and cancellation."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import pip_install

A = TypeVar("A")
B = TypeVar("B")
Engine = Literal["auto", "alone", "threads", "processes", "ray"]
Progress = Callable[[int, int], None]
"""Called as `progress(done, total)`."""

_AT_ONCE = 8  # each may hold some megabytes
REQUESTS = 16
"""Number of small requests to a disk or server at once."""

_QUEUED = 4096
_thread = threading.local()


def check_cancelled() -> None:
    """Called by long work from time to time: raises if it was cancelled, for example by Ctrl-C."""
    cancelled: threading.Event | None = getattr(_thread, "cancelled", None)
    if cancelled is not None and cancelled.is_set():
        raise RuntimeError("this work was cancelled")


def for_each(
    function: Callable[[A], B],
    items: Sequence[A],
    engine: Engine = "auto",
    progress: Progress | None = None,
    *,
    at_once: int = _AT_ONCE,
) -> list[B]:
    """The results of `function` for all items, in order; raises what it raises.

    Args:
        function: calls `check_cancelled` from time to time if it takes long.
        engine: "ray" for a cluster; else threads.
        progress: called after each item.
        at_once: number of threads: few for large files such as tars, more for small requests.
    """
    if engine == "ray":
        return _each_on_ray(function, items, progress)
    from concurrent.futures import ThreadPoolExecutor

    out: list[B] = []
    cancelled = threading.Event()

    def call(item: A) -> B:
        _thread.cancelled = cancelled
        check_cancelled()
        return function(item)

    with ThreadPoolExecutor(max(1, min(at_once, len(items))), "kohya-bucket") as pool:
        try:
            for start in range(0, len(items), _QUEUED):
                for result in pool.map(call, items[start : start + _QUEUED]):
                    out.append(result)
                    if progress is not None:
                        progress(len(out), len(items))
        except BaseException:
            cancelled.set()
            raise
    return out


def _each_on_ray(function: Callable[[A], B], items: Sequence[A], progress: Progress | None) -> list[B]:
    """One task per item. All machines must see the files: shared folders or URLs."""
    data = joined_ray().data
    data.DataContext.get_current().enable_progress_bars = False
    out: dict[int, B] = {}
    # Pickled here: a row of Ray Data cannot hold an arbitrary object.
    calls = [{"number": i, "call": pickle.dumps((function, item))} for i, item in enumerate(items)]
    for row in data.from_items(calls, override_num_blocks=len(calls)).map(_call).iter_rows() if calls else ():
        out[int(row["number"])] = pickle.loads(row["result"])
        if progress is not None:
            progress(len(out), len(items))
    results = [out[i] for i in range(len(items))]
    if failed := [result for result in results if isinstance(result, KohyaBucketError)]:
        raise failed[0]
    return results


def _call(row: dict[str, Any]) -> dict[str, Any]:
    function, item = pickle.loads(row["call"])
    try:
        result = function(item)
    except KohyaBucketError as error:  # Ray would wrap it in a traceback
        result = error
    return {"number": row["number"], "result": pickle.dumps(result)}


def joined_ray() -> Any:
    """The module `ray`, connected to the cluster of RAY_ADDRESS or of this machine, else to a new local one.

    Raises:
        KohyaBucketError: Ray is missing.
    """
    try:
        import ray
        import ray.data
    except ImportError:
        raise KohyaBucketError(f"--engine ray needs Ray Data: {pip_install('ray')}") from None
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    return ray
