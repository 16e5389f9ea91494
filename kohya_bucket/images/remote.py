"""Images behind URLs (s3://, gs://, https://, …), through the `fsspec` package.

Headers are read with ranged requests: one of 64 KiB nearly always suffices.
"""

from __future__ import annotations

import datetime
import functools
import io
import os
import re
import zlib
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import EXTRAS, pip_install
from kohya_bucket.images.pieces import RawFile

_Answer = TypeVar("_Answer")
_FIRST = 1 << 16
_BLOCK = 1 << 22
_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.-]+)*://")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_TAGS = ("ETag", "etag", "blob_id")  # the last one in the Hugging Face Hub
_SECOND = 1_000_000_000


def is_url(path: str) -> bool:
    """Whether it begins with the name of a protocol; one letter is a drive, as in C://images."""
    return "://" in path and _PROTOCOL.match(path) is not None


class RemoteFile:
    """A file behind a URL that is read in pieces; see `Pieces`. `OSError` if it cannot be."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.length = int(_info(*storage_of(url))["size"] or 0)
        self._head = self._read(0, min(_FIRST, self.length))

    def read_at(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self.length)
        if stop <= len(self._head):
            return self._head[offset:stop]
        return self._read(offset, stop)

    def _read(self, start: int, stop: int) -> bytes:
        return read_remote(self._url, start, stop) if start < stop else b""


def open_remote(url: str) -> io.BufferedReader:
    """A file that is gone through from front to back: read in large blocks, of which the last one is kept."""
    return io.BufferedReader(RawFile(RemoteFile(url)), _BLOCK)


def read_remote(url: str, start: int | None = None, stop: int | None = None) -> bytes:
    """The whole file, or its bytes from `start` to `stop`. `OSError` if it cannot be read."""
    system, path = storage_of(url)
    data: bytes = as_os_error(lambda: system.cat_file(path, start=start, end=stop))
    return data


def fetched(path: str) -> str | bytes:
    """What a decoder opens: the path of a file on this machine; of an address, what lies there."""
    return read_remote(path) if is_url(path) else path


def stat_remote(url: str) -> tuple[int, int]:
    """(time of the last change in ns, 0 if the storage does not tell; bytes). `OSError` if it does not exist."""
    system, path = storage_of(url)
    info = _info(system, path)
    return int(changed_at(info) * _SECOND), int(info["size"] or 0)


def stamp_remote(url: str) -> tuple[int, int]:
    """(bytes, time of the last change in ns) as of now. `OSError` if it does not exist.

    Where the storage names the content by a tag (an ETag), that takes the place of what is below a second.
    """
    system, path = storage_of(url)
    as_os_error(lambda: system.invalidate_cache(system._parent(path)))  # a listing may have told something else before
    info = _info(system, path)
    tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    changed = changed_at(info)
    named = int(changed) * _SECOND + zlib.crc32(tag.encode()) % _SECOND
    return int(info["size"] or 0), named if tag else int(changed * _SECOND)


def changed_at(info: dict[str, Any]) -> float:
    """Time of the last change in seconds, of what `fsspec` says of a file; 0 if the storage does not tell."""
    when = next((info[name] for name in _TIMES if info.get(name)), 0)
    if isinstance(when, str):
        when = datetime.datetime.fromisoformat(when.replace("Z", "+00:00"))
    return when.timestamp() if isinstance(when, datetime.datetime) else float(when)


def list_remote(url: str, recursive: bool, extensions: Collection[str]) -> list[str]:
    """URLs of the images in a folder, or that match a pattern, or of the one file that `url` names; sorted."""
    system, path = storage_of(url)
    if any(sign in path for sign in "*?["):
        found = as_os_error(lambda: system.glob(path))
    elif as_os_error(lambda: system.isdir(path)):
        found = as_os_error(lambda: system.find(path, maxdepth=None if recursive else 1))
    elif as_os_error(lambda: system.exists(path)):
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
    except Exception as error:  # also of storages that need to be told more than an address
        more = f": {pip_install(protocol)}" if protocol in EXTRAS else ""
        raise KohyaBucketError(f"{protocol}:// cannot be read here: {error}{more}") from None


def storage_of(url: str) -> tuple[Any, str]:
    """What `fsspec` has for the storage of a URL, and the path in it.

    Raises:
        KohyaBucketError: there is no storage of that protocol, or it needs more than an address.
        OSError: the address is none.
    """
    system = _system(url.split("://", 1)[0], os.getpid())
    return system, as_os_error(lambda: system._strip_protocol(url))


def _info(system: Any, path: str) -> dict[str, Any]:
    info: dict[str, Any] = as_os_error(lambda: system.info(path))
    return info


def as_os_error(ask: Callable[[], _Answer]) -> _Answer:
    """Storage libraries raise what they like; here it is an `OSError`."""
    try:
        return ask()
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error
