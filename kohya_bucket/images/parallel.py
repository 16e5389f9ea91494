"""One function for each of some things side by side: on threads, or on the machines of a Ray cluster.

Also what such work shares with its caller: how far it is, and whether it is still wanted.
"""

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
"""How many small requests wait for a disk or a server at once."""

_QUEUED = 4096
_here = threading.local()


def check_cancelled() -> None:
    """Called from time to time by work that takes long: raises if it was cancelled, as by Ctrl-C."""
    cancelled: threading.Event | None = getattr(_here, "cancelled", None)
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
    """What `function` returns for each item, in their order; raises what it raises.

    Args:
        function: calls `check_cancelled` from time to time if it takes long.
        engine: "ray" for a cluster; else threads.
        progress: called after each item.
        at_once: threads: few for large files such as tars, more for small requests.
    """
    if engine == "ray":
        return _each_on_ray(function, items, progress)
    from concurrent.futures import ThreadPoolExecutor

    out: list[B] = []
    cancelled = threading.Event()

    def one(item: A) -> B:
        _here.cancelled = cancelled
        check_cancelled()
        return function(item)

    with ThreadPoolExecutor(max(1, min(at_once, len(items))), "kohya-bucket") as pool:
        try:
            for start in range(0, len(items), _QUEUED):
                for result in pool.map(one, items[start : start + _QUEUED]):
                    out.append(result)
                    if progress is not None:
                        progress(len(out), len(items))
        except BaseException:
            cancelled.set()
            raise
    return out


def _each_on_ray(function: Callable[[A], B], items: Sequence[A], progress: Progress | None) -> list[B]:
    """One task for each item. Every machine must see the files: shared folders or URLs."""
    data = joined_ray().data
    data.DataContext.get_current().enable_progress_bars = False
    out: dict[int, B] = {}
    # Pickled here: a row of Ray Data holds no object of any class.
    given = [{"number": i, "todo": pickle.dumps((function, item))} for i, item in enumerate(items)]
    for row in data.from_items(given, override_num_blocks=len(given)).map(_one).iter_rows() if given else ():
        out[int(row["number"])] = pickle.loads(row["result"])
        if progress is not None:
            progress(len(out), len(items))
    results = [out[i] for i in range(len(items))]
    if failed := [result for result in results if isinstance(result, KohyaBucketError)]:
        raise failed[0]
    return results


def _one(row: dict[str, Any]) -> dict[str, Any]:
    function, item = pickle.loads(row["todo"])
    try:
        result = function(item)
    except KohyaBucketError as error:  # Ray would wrap it in a traceback
        result = error
    return {"number": row["number"], "result": pickle.dumps(result)}


def joined_ray() -> Any:
    """The module `ray`, joined to the cluster that RAY_ADDRESS names or that runs here, else to one of its own.

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
