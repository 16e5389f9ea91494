"""A function applied to many items in parallel, on threads or on a Ray cluster, with progress and cancellation."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn, TypeVar

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
    ray = joined_ray()
    task, called = ray.remote(_call), ray.put(function)
    out: list[B] = []
    for result in [task.remote(called, item) for item in items]:
        try:
            out.append(pickle.loads(ray.get(result)))
        except ray.exceptions.RayTaskError as error:
            raise_cause(error)
        if progress is not None:
            progress(len(out), len(items))
    return out


def _call(function: Callable[[A], B], item: A) -> bytes:
    return pickle.dumps(function(item))  # arrays as they are would come from Ray read-only


def raise_cause(error: Any) -> NoReturn:
    """Raise what a process of Ray raised, as its original exception."""
    cause = getattr(error, "cause", None)
    raise cause if isinstance(cause, Exception) else error


def joined_ray() -> Any:
    """The module `ray`, connected to the cluster of RAY_ADDRESS or of this machine, else to a new local one.

    Raises:
        KohyaBucketError: Ray is missing.
    """
    try:
        import ray
    except ImportError:
        raise KohyaBucketError(f"--engine ray needs Ray: {pip_install('ray')}") from None
    if not ray.is_initialized():
        ray.init(ignore_reinit_error=True, include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    return ray
