"""Ranges of files in S3 by obstore, where it is installed: faster than by s3fs, see `benchmarks/remote_store.py`.

It reads the account from AWS' environment variables and the machine, and knows no profiles. So it only ever comes
first: what it does not give is asked for through `fsspec`, and a bucket of which it gives nothing is left to that. Its
threads do not survive a fork, so the child of a process that has used it is left to `fsspec` too.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

__all__ = ["ranges_by_obstore"]

_AT_ONCE = 16


def ranges_by_obstore(places: Sequence[tuple[str, int, int]]) -> list[bytes | None]:
    """The bytes of each (URL, start, stop), all of one bucket; None for those that this way does not give."""
    scheme, _, rest = places[0][0].partition("://")
    bucket = rest.partition("/")[0]
    get = _reader(bucket, os.getpid()) if scheme == "s3" else None
    if get is None or bucket in _left_to_fsspec:
        return [None] * len(places)
    prefix = len(scheme) + 3 + len(bucket) + 1
    found = list(_pool(os.getpid()).map(lambda place: get(place[0][prefix:], place[1], place[2]), places))
    if all(data is None for data in found):
        _left_to_fsspec.add(bucket)
    return found


_left_to_fsspec: set[str] = set()
_first_process: list[int] = []  # that used obstore, of this one and those it was forked from


@functools.lru_cache(maxsize=4)
def _pool(_process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_AT_ONCE, "kohya-bucket-ranges")


@functools.lru_cache(maxsize=64)
def _reader(bucket: str, process: int) -> Callable[[str, int, int], bytes | None] | None:
    _first_process[:] = _first_process or [process]
    if _first_process != [process]:
        return None
    try:
        from obstore import get_range
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError:
        return None
    plain = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://")
    options: dict[str, Any] = {"client_options": {"allow_http": True}} if plain else {}
    try:
        store = S3Store(bucket, retry_config={"max_retries": 0}, **options)
    except (BaseError, ValueError, TypeError):
        return None

    def get(path: str, start: int, stop: int) -> bytes | None:
        try:
            return bytes(get_range(store, path, start=start, end=stop))
        except (BaseError, ValueError, TypeError, OSError):
            return None

    return get
