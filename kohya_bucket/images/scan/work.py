"""What can be done to a run of files, each as `function(paths) -> (rows, failures)`.

Rows are bytes, one row per path laid out as `row_dtype` says, zero where it failed; failures are
(position, reason). They are addressed by name, since a helper process is told by name which one to run. Such a
process shall start quickly: numpy, Pillow and what else not every scan needs are not imported here.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable

from kohya_bucket.images.files.remote import is_url, stat_remote
from kohya_bucket.images.headers.header import read_headers
from kohya_bucket.images.scan.arrow_stat import stat_together
from kohya_bucket.images.unreadable import explain_os_error

__all__ = ["WORK", "Failures"]

Failures = list[tuple[int, str]]


def _sizes(paths: list[str]) -> tuple[bytes, Failures]:
    numbers, failures = read_headers(paths)
    return numbers.tobytes(), failures


def _stats(paths: list[str]) -> tuple[bytes, Failures]:
    if (together := stat_together(paths)) is not None:
        return together.tobytes(), []
    numbers = array("q")
    failures: Failures = []
    for i, path in enumerate(paths):
        try:
            status = os.stat(path)
            numbers.append(status.st_mtime_ns)
            numbers.append(status.st_size)
        except (OSError, ValueError) as error:
            if is_url(path):
                numbers.extend(_remote_stat(path, i, failures))
                continue
            failures.append((i, explain_os_error(error)))
            numbers.extend((0, 0))
    return numbers.tobytes(), failures


def _remote_stat(url: str, position: int, failures: Failures) -> tuple[int, int]:
    try:
        return stat_remote(url)
    except OSError as error:
        failures.append((position, explain_os_error(error)))
        return 0, 0


def _hashes(paths: list[str]) -> tuple[bytes, Failures]:
    from kohya_bucket.images.files.content_hash import HASH_LENGTH, hash_file

    rows = bytearray()
    failures: Failures = []
    for i, path in enumerate(paths):
        try:
            rows += hash_file(path).encode("ascii")
        except (OSError, ValueError) as error:
            rows += bytes(HASH_LENGTH)
            failures.append((i, explain_os_error(error)))
    return bytes(rows), failures


def _verify(paths: list[str]) -> tuple[bytes, Failures]:
    from kohya_bucket.images.headers.by_pillow import verify_pixels

    problems = [verify_pixels(path) for path in paths]
    failures = [(i, problem) for i, problem in enumerate(problems) if problem is not None]
    return bytes(problem is None for problem in problems), failures


WORK: dict[str, Callable[[list[str]], tuple[bytes, Failures]]] = {
    "size": _sizes,
    "stat": _stats,
    "hash": _hashes,
    "verify": _verify,
}
