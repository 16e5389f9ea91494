"""The same work on Ray Data: many machines, one run of files per task, equal rows."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import pip_install
from kohya_bucket.images.progress import Progress
from kohya_bucket.images.scan.work import WORK, Failures

__all__ = ["each_on_ray", "joined_ray", "run_on_ray"]

A = TypeVar("A")
B = TypeVar("B")
_RUN = 2048


def run_on_ray(work: str, paths: Sequence[str]) -> tuple[bytes, Failures]:
    """Rows and failures of `WORK[work]` over all paths, computed by a Ray cluster (a local one if none is joined).

    Every machine must see the paths: shared folders or URLs.

    Raises:
        KohyaBucketError: Ray is missing.
    """
    runs = [list(paths[i : i + _RUN]) for i in range(0, len(paths), _RUN)]
    rows, failures = [], []
    for start, (part, why) in zip(range(0, len(paths), _RUN), each_on_ray(WORK[work], runs), strict=True):
        rows.append(part)
        failures += [(start + i, reason) for i, reason in why]
    return b"".join(rows), failures


def each_on_ray(function: Callable[[A], B], items: Sequence[A], progress: Progress | None = None) -> list[B]:
    """What `function` gives for each item, one task for each. Raises what it raises, and as `run_on_ray`."""
    data = _ray_data()
    out: dict[int, B] = {}
    if items:
        # Pickled here: a row of Ray Data holds no object of any class.
        given = [{"number": i, "todo": pickle.dumps((function, item))} for i, item in enumerate(items)]
        done = data.from_items(given, override_num_blocks=len(given)).map(_one)
        for row in done.iter_rows():
            out[int(row["number"])] = pickle.loads(row["result"])
            if progress is not None:
                progress(len(out), len(items))
    results = [out[i] for i in range(len(items))]
    for result in results:
        if isinstance(result, KohyaBucketError):
            raise result
    return results


def _one(row: dict[str, Any]) -> dict[str, Any]:
    function, item = pickle.loads(row["todo"])
    try:
        result = function(item)
    except KohyaBucketError as error:  # Ray would wrap it in a traceback
        result = error
    return {"number": row["number"], "result": pickle.dumps(result)}


def _ray_data() -> Any:
    ray = joined_ray()
    ray.data.DataContext.get_current().enable_progress_bars = False
    return ray.data


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
