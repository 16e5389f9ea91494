"""What can be done to a run of files, each as `function(paths) -> (rows, failures)`.

Rows are a structured array with one row per path, zero where it failed; failures are (position, reason).
They are addressed by name, since a worker process is told by name which one to run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.images.arrow_stat import stat_together
from kohya_bucket.images.content_hash import HASH_LENGTH, hash_file
from kohya_bucket.images.decoder import explain_os_error, verify_pixels
from kohya_bucket.images.header import read_headers
from kohya_bucket.images.remote import is_url, stat_remote

__all__ = ["WORK", "Failures", "Rows", "row_dtype"]

Rows = npt.NDArray[Any]
Failures = list[tuple[int, str]]

_DTYPES = {
    "size": np.dtype([("width", "<i4"), ("height", "<i4"), ("orientation", "<i4"), ("format", "<i4")]),
    "stat": np.dtype([("mtime_ns", "<i8"), ("bytes", "<i8")]),
    "hash": np.dtype([("hash", f"S{HASH_LENGTH}")]),
    "verify": np.dtype([("ok", "u1")]),
}


def row_dtype(work: str) -> np.dtype[Any]:
    """Columns of a piece of work, by its name."""
    return _DTYPES[work]


def _sizes(paths: list[str]) -> tuple[Rows, Failures]:
    rows, failures = read_headers(paths)
    return rows.reshape(-1).view(_DTYPES["size"]), failures


def _stats(paths: list[str]) -> tuple[Rows, Failures]:
    if (together := stat_together(paths)) is not None:
        return together.reshape(-1).view(_DTYPES["stat"]), []
    numbers: list[int] = []
    failures: Failures = []
    stat = os.stat
    for path in paths:
        try:
            status = stat(path)
            numbers += (status.st_mtime_ns, status.st_size)
        except (OSError, ValueError) as error:
            if is_url(path):
                numbers += _remote_stat(path, len(numbers) // 2, failures)
                continue
            reason = explain_os_error(error) if isinstance(error, OSError) else str(error)
            failures.append((len(numbers) // 2, reason))
            numbers += (0, 0)
    return np.array(numbers, dtype=np.int64).view(_DTYPES["stat"]), failures


def _remote_stat(url: str, position: int, failures: Failures) -> tuple[int, int]:
    try:
        return stat_remote(url)
    except OSError as error:
        failures.append((position, explain_os_error(error)))
        return 0, 0


def _hashes(paths: list[str]) -> tuple[Rows, Failures]:
    rows = np.zeros(len(paths), dtype=_DTYPES["hash"])
    failures: Failures = []
    for i, path in enumerate(paths):
        try:
            rows["hash"][i] = hash_file(path)
        except (OSError, ValueError) as error:
            failures.append((i, explain_os_error(error) if isinstance(error, OSError) else str(error)))
    return rows, failures


def _verify(paths: list[str]) -> tuple[Rows, Failures]:
    rows = np.zeros(len(paths), dtype=_DTYPES["verify"])
    failures: Failures = []
    for i, path in enumerate(paths):
        problem = verify_pixels(path)
        rows["ok"][i] = problem is None
        if problem is not None:
            failures.append((i, problem))
    return rows, failures


WORK: dict[str, Callable[[list[str]], tuple[Rows, Failures]]] = {
    "size": _sizes,
    "stat": _stats,
    "hash": _hashes,
    "verify": _verify,
}
