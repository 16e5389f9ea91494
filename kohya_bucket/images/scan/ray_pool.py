"""The same work on Ray Data: many machines, one run of files per task, equal rows."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import pip_install
from kohya_bucket.images.scan.work import WORK, Failures

__all__ = ["joined_ray", "run_on_ray"]

_RUN = 2048


def run_on_ray(work: str, paths: Sequence[str]) -> tuple[bytes, Failures]:
    """Rows and failures of `WORK[work]` over all paths, computed by a Ray cluster (a local one if none is joined).

    Every machine must see the paths: shared folders or URLs.

    Raises:
        KohyaBucketError: Ray is missing.
    """
    data = _ray_data()
    runs = [{"start": i, "work": work, "paths": list(paths[i : i + _RUN])} for i in range(0, len(paths), _RUN)]
    if not runs:
        return b"", []
    done = data.from_items(runs, override_num_blocks=len(runs)).map(_one_run)
    rows, failures = [], []
    for result in sorted(done.iter_rows(), key=lambda result: int(result["start"])):
        part, why = pickle.loads(result["result"])
        rows.append(part)
        failures += [(int(result["start"]) + i, reason) for i, reason in why]
    return b"".join(rows), failures


def _one_run(run: dict[str, Any]) -> dict[str, Any]:
    rows, failures = WORK[str(run["work"])]([str(path) for path in run["paths"]])
    return {"start": run["start"], "result": pickle.dumps((rows, failures))}


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
