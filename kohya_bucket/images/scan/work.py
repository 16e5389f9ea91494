"""What can be done to a run of files, each as `function(paths) -> (rows, failures)`.

Rows are bytes, one row per path laid out as `row_dtype` says, zero where it failed; failures are
(position, reason). They are addressed by name, since a helper process is told by name which one to run. Such a
process shall start quickly: numpy, Pillow and what else not every scan needs are not imported here.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

from kohya_bucket.images.files.content_hash import HASH_LENGTH, hash_file
from kohya_bucket.images.files.remote import is_url, stat_remote
from kohya_bucket.images.headers.header import read_header
from kohya_bucket.images.scan.arrow_stat import stat_together
from kohya_bucket.images.unreadable import UnreadableImageError, explain_os_error

__all__ = ["WORK", "Failures"]

Failures = list[tuple[int, str]]


def _one_by_one(
    look: Callable[[str], Iterable[int]], columns: int, typecode: str, paths: list[str]
) -> tuple[bytes, Failures]:
    """The numbers that `look` finds in each file, as a row of so many columns."""
    rows: list[Iterable[int]] = []
    failures: Failures = []
    nothing = (0,) * columns
    for i, path in enumerate(paths):
        try:
            rows.append(look(path))
        except (UnreadableImageError, OSError, ValueError) as error:
            rows.append(nothing)
            failures.append((i, explain_os_error(error)))
    return array(typecode, chain.from_iterable(rows)).tobytes(), failures


def _stat(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        if not is_url(path):
            raise
        return stat_remote(path)
    return status.st_mtime_ns, status.st_size


def _stats(paths: list[str]) -> tuple[bytes, Failures]:
    together = stat_together(paths)
    return _one_by_one(_stat, 2, "q", paths) if together is None else (together.tobytes(), [])


def _hash(path: str) -> bytes:
    return hash_file(path).encode("ascii")


def _verify(path: str) -> tuple[int]:
    from kohya_bucket.images.headers.by_pillow import verify_pixels

    if not is_url(path):
        read_header(path)  # refuses what is no picture before all of it is read: pipes, devices, gigabytes of nothing
    if problem := verify_pixels(path):
        raise UnreadableImageError(problem)
    return (1,)


def _clip(path: str, decode: bool = False) -> Iterable[int]:
    from kohya_bucket.images.headers.clip import read_clip

    return read_clip(path, decode=decode)


WORK: dict[str, Callable[[list[str]], tuple[bytes, Failures]]] = {
    "size": partial(_one_by_one, read_header, 4, "q"),
    "stat": _stats,
    "hash": partial(_one_by_one, _hash, HASH_LENGTH, "B"),
    "verify": partial(_one_by_one, _verify, 1, "B"),
    "clip": partial(_one_by_one, _clip, 7, "q"),
    "decoded clip": partial(_one_by_one, partial(_clip, decode=True), 7, "q"),
}
