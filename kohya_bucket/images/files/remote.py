"""Images behind URLs (s3://, gs://, https://, …), through the `fsspec` package.

Headers are read with ranged requests: one of 64 KiB nearly always suffices.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import pip_install

__all__ = ["RemoteFile", "is_url", "list_remote", "read_remote", "stat_remote"]

_Answer = TypeVar("_Answer")
_FIRST = 1 << 16
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")


def is_url(path: str) -> bool:
    return "://" in path


class RemoteFile:
    """A file behind a URL that is read in pieces; see `Pieces`. `OSError` if it cannot be."""

    def __init__(self, url: str) -> None:
        self._system, self._path = _open(url)
        self.length = int(_info(self._system, self._path)["size"] or 0)
        self._head = self._read(0, min(_FIRST, self.length))

    def read_at(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self.length)
        if stop <= len(self._head):
            return self._head[offset:stop]
        return self._read(offset, stop)

    def _read(self, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""
        data: bytes = _guarded(lambda: self._system.cat_file(self._path, start=start, end=stop))
        return data


def read_remote(url: str) -> bytes:
    """The whole file. `OSError` if it cannot be read."""
    system, path = _open(url)
    data: bytes = _guarded(lambda: system.cat_file(path))
    return data


def stat_remote(url: str) -> tuple[int, int]:
    """(time of the last change in ns, 0 if the storage does not tell; bytes). `OSError` if it does not exist."""
    system, path = _open(url)
    info = _info(system, path)
    when = next((info[name] for name in _TIMES if info.get(name)), 0)
    if isinstance(when, str):
        when = datetime.datetime.fromisoformat(when.replace("Z", "+00:00"))
    if isinstance(when, datetime.datetime):
        when = when.timestamp()
    return int(when * 1_000_000_000), int(info["size"] or 0)


def list_remote(url: str, recursive: bool, extensions: Collection[str]) -> list[str]:
    """URLs of the images in a folder, or that match a pattern, or of the one file that `url` names; sorted."""
    system, path = _open(url)
    if any(sign in path for sign in "*?["):
        found = _guarded(lambda: system.glob(path))
    elif _guarded(lambda: system.isdir(path)):
        found = _guarded(lambda: system.find(path, maxdepth=None if recursive else 1))
    elif _guarded(lambda: system.exists(path)):
        return [url]
    else:
        raise KohyaBucketError(f"{url}: no such file or folder there; check the address and your access to it")
    wanted = tuple(extensions)
    return sorted(system.unstrip_protocol(name) for name in found if name.lower().endswith(wanted))


@functools.lru_cache(maxsize=64)
def _system(protocol: str, _process: int) -> Any:
    """The storage of a protocol; one for each process, since those with threads do not survive a fork."""
    try:
        import fsspec
    except ImportError:
        raise KohyaBucketError(
            f"{protocol}:// needs fsspec: {pip_install('remote')} and what your storage needs, such as s3fs"
        ) from None
    try:
        return fsspec.filesystem(protocol)
    except (ImportError, ValueError) as error:
        raise KohyaBucketError(f"{protocol}:// cannot be read here: {error}") from None


def _open(url: str) -> tuple[Any, str]:
    system = _system(url.split("://", 1)[0], os.getpid())
    return system, system._strip_protocol(url)


def _info(system: Any, path: str) -> dict[str, Any]:
    info: dict[str, Any] = _guarded(lambda: system.info(path))
    return info


def _guarded(ask: Callable[[], _Answer]) -> _Answer:
    """Storage libraries raise what they like; here it is an `OSError`."""
    try:
        return ask()
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
