"""Bytes of an image, read in pieces: from an open file, from memory, or from a URL (s3://, gs://, https://, …).

URLs are read through the package `fsspec`. A header nearly always takes one request, of 64 KiB.
"""

from __future__ import annotations

import datetime
import errno
import functools
import io
import os
import re
import zlib
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import EXTRAS, pip_install
from kohya_bucket.images.formats import UnreadableImageError, is_listed

HEAD_BYTES = 4096
"""The first read of every file; a shorter result is the whole file."""

MAX_HEADER_BYTES = 1 << 28
"""The most that is read of a file to find its size; some decoders want all of it first."""

_BUFFER = 1 << 16
_READ_COSTS = 1 << 10  # bytes that each read counts at least: a decoder may make millions of one byte in a wrong file


class Pieces(Protocol):
    """A file that can be read in pieces."""

    @property
    def length(self) -> int:
        """Bytes in all."""

    def read_at(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer at the end."""


class Region:
    """A file inside another, such as a member of a tar: `length` bytes from `start`."""

    def __init__(self, source: Opened, start: int, length: int) -> None:
        self._source, self._start, self.length = source, start, length

    def read_at(self, offset: int, length: int) -> bytes:
        if offset >= self.length:
            return b""
        return read_at(self._source, self._start + offset, min(length, self.length - offset))


Opened = int | bytes | io.BufferedReader | Pieces
"""An open file or its descriptor, a file in memory, or anything that can be read in pieces."""


def _seek_and_read(fd: int, length: int, offset: int) -> bytes:
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, length)


_read_fd = getattr(os, "pread", _seek_and_read)  # Windows has no call that does both


def read_at(source: Opened, offset: int, length: int) -> bytes:
    """At most `length` bytes from `offset`; fewer at the end."""
    if isinstance(source, int):
        data: bytes = _read_fd(source, length, offset)
        return data
    if isinstance(source, bytes):
        return source[offset : offset + length]
    if isinstance(source, io.BufferedReader):
        source.seek(offset)
        return source.read(length)
    return source.read_at(offset, length)


def length_of(source: Opened) -> int:
    """Bytes in all."""
    if isinstance(source, int):
        return os.lseek(source, 0, os.SEEK_END)
    if isinstance(source, io.BufferedReader):
        return source.seek(0, os.SEEK_END)
    return len(source) if isinstance(source, bytes) else source.length


class RawFile(io.RawIOBase):
    """An `Opened` as an unbuffered file."""

    def __init__(self, source: Opened) -> None:
        self._source, self._length, self._at = source, length_of(source), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = read_at(self._source, self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        data = read_at(self._source, self._at, max(0, self._length - self._at))
        self._at += len(data)
        return data


class HeaderFile(io.BufferedReader):
    """An `Opened` as a buffered file, for a decoder that looks for the size in it.

    Reading more than `MAX_HEADER_BYTES` in all is an `UnreadableImageError`.
    """

    def __init__(self, source: Opened) -> None:
        super().__init__(RawFile(source), _BUFFER)
        self._length, self._left = length_of(source), MAX_HEADER_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0 or size > _BUFFER:
            remaining = max(0, self._length - self.tell())
            whole = size is None or not 0 <= size < remaining
            self._spend(remaining if whole else size or 0)
            return super().read(-1 if whole else size)
        self._spend(size)
        return super().read(size)

    def readline(self, size: int | None = -1, /) -> bytes:
        line = super().readline(self._left if size is None or size < 0 else min(size, self._left))
        self._spend(len(line))
        return line

    def _spend(self, length: int) -> None:
        self._left -= max(length, _READ_COSTS)
        if self._left <= 0:
            self._left = 0
            raise UnreadableImageError(
                f"its size was not found in the first {MAX_HEADER_BYTES >> 20} MiB of {self._length:,} bytes: "
                "damaged, or not an image"
            )


_Answer = TypeVar("_Answer")
_ANSWERS = FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError
_FIRST = 1 << 16
_BLOCK = 1 << 22
_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+(::[A-Za-z0-9+.-]+)*://")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_TAGS = ("ETag", "etag", "blob_id")  # the last one in the Hugging Face Hub
_SECOND = 1_000_000_000


def is_url(path: str) -> bool:
    """Whether a path begins with a protocol; a single letter is a drive, as in C://images."""
    return "://" in path and _PROTOCOL.match(path) is not None


class RemoteFile:
    """`Pieces` of a file behind a URL. `OSError` if it cannot be read."""

    def __init__(self, url: str) -> None:
        self._url = url
        size = _info(*storage_of(url))["size"]
        if size is None:  # as some servers answer: then only all of it tells
            self._head = read_remote(url)
            self.length = len(self._head)
        else:
            self.length = int(size)
            self._head = self._read(0, min(_FIRST, self.length))

    def read_at(self, offset: int, length: int) -> bytes:
        stop = min(offset + length, self.length)
        if stop <= len(self._head):
            return self._head[offset:stop]
        return self._read(offset, stop)

    def _read(self, start: int, stop: int) -> bytes:
        return read_remote(self._url, start, stop) if start < stop else b""


def open_remote(url: str) -> io.BufferedReader:
    """A file to read from front to back, in large blocks."""
    return io.BufferedReader(RawFile(RemoteFile(url)), _BLOCK)


def read_remote(url: str, start: int | None = None, stop: int | None = None) -> bytes:
    """A whole file, or its bytes from `start` to `stop`. `OSError` if it cannot be read."""
    system, path = storage_of(url)
    return bytes(as_os_error(lambda: system.cat_file(path, start=start, end=stop)))


def fetched(path: str) -> str | bytes:
    """What a decoder opens: a local path unchanged, or the bytes behind an address."""
    return read_remote(path) if is_url(path) else path


def stat_remote(url: str) -> tuple[int, int]:
    """(modification time in ns, 0 if the storage does not tell; bytes). `OSError` if there is no such file."""
    system, path = storage_of(url)
    info = _info(system, path)
    return int(changed_at(info) * _SECOND), int(info["size"] or 0)


def stamp_remote(url: str) -> tuple[int, int]:
    """(bytes, modification time in ns) as of now. `OSError` if there is no such file.

    If the storage tags the content (ETag), a hash of the tag replaces the fraction of a second.
    """
    system, path = storage_of(url)
    as_os_error(lambda: system.invalidate_cache(system._parent(path)))  # an earlier listing may be outdated
    info = _info(system, path)
    tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
    changed = changed_at(info)
    tagged = int(changed) * _SECOND + zlib.crc32(tag.encode()) % _SECOND
    return int(info["size"] or 0), tagged if tag else int(changed * _SECOND)


def changed_at(info: dict[str, Any]) -> float:
    """Modification time in seconds from `fsspec`'s description of a file; 0 if the storage does not tell."""
    when = next((info[name] for name in _TIMES if info.get(name)), 0)
    if isinstance(when, str):
        when = datetime.datetime.fromisoformat(when.replace("Z", "+00:00"))
    return when.timestamp() if isinstance(when, datetime.datetime) else float(when)


def list_remote(url: str, recursive: bool, extensions: Collection[str]) -> list[str]:
    """Sorted URLs of the images in a folder or matching a pattern, or of the one file that `url` names."""
    if split_archive(url)[1]:
        raise KohyaBucketError(f"{url}: images in an archive are not listed: unpack it first")
    system, path = storage_of(url)
    said, *pattern = re.split(r"[*?[]", path.rstrip("/"), maxsplit=1)
    # As on a disk, a name with such a sign in it comes before what it fits as a pattern.
    if as_os_error(lambda: system.isdir(path)):
        names = as_os_error(lambda: system.find(path, maxdepth=None if recursive else 1))
    elif as_os_error(lambda: system.exists(path)):
        return [url]
    elif pattern:
        names = as_os_error(lambda: system.glob(path))
    else:
        raise KohyaBucketError(f"{url}: no such file or folder there; check the address and your access to it")
    images = (name for name in names if name.lower().endswith(tuple(extensions)))
    # Only what the pattern itself matched can be hidden; "_" stands for the start of a name that the pattern cut.
    begun = "_" * (said[-1:] not in ("", "/"))
    shown = (name for name in images if all(map(is_listed, (begun + name[len(said) :]).split("/"))))
    return sorted(map(system.unstrip_protocol, shown))


@functools.lru_cache(maxsize=64)
def _system(protocol: str, archive: str, _process: int) -> Any:
    """A protocol's file system, or that in an archive; one per process, since those with threads do not survive a
    fork."""
    try:
        import fsspec
    except ImportError:
        raise KohyaBucketError(
            f"{protocol}:// needs fsspec: {pip_install('remote')} and what your storage needs, such as s3fs"
        ) from None
    try:
        return fsspec.core.url_to_fs(f"{protocol}://{archive}")[0] if archive else fsspec.filesystem(protocol)
    except Exception as error:  # some storages need more than an address
        more = f": {pip_install(protocol)}" if protocol in EXTRAS else ""
        raise KohyaBucketError(f"{protocol}:// cannot be read here: {error}{more}") from None


def storage_of(url: str) -> tuple[Any, str]:
    """`fsspec`'s file system for a URL, and the path in it.

    Raises:
        KohyaBucketError: the protocol is unknown, or needs more than an address.
        OSError: the address is malformed.
    """
    url, archive = split_archive(url)
    system = _system(url.split("://", 1)[0], archive, os.getpid())
    return system, as_os_error(lambda: system._strip_protocol(url))


def split_archive(url: str) -> tuple[str, str]:
    """The address of a member, and "::" with that of its archive, "" if it is in none.

    Streams of the Hub have `zip://member::archive`. Not tar: its file system mixes what threads read.
    """
    member, colons, archive = url.partition("::") if url.startswith("zip://") else (url, "", "")
    return member, colons + archive


def _info(system: Any, path: str) -> Any:
    return as_os_error(lambda: system.info(path))


def as_os_error(ask: Callable[[], _Answer]) -> _Answer:
    """Turns whatever a storage library raises into an `OSError`, with a number unless it says what is there: only
    errors of parsers, which have read a file, have none.
    """
    try:
        return ask()
    except Exception as error:
        if isinstance(error, OSError) and (error.errno is not None or isinstance(error, _ANSWERS)):
            raise
        number = errno.EACCES if isinstance(error, PermissionError) else errno.EIO
        says_it_all = isinstance(error, OSError) and str(error)
        raise OSError(number, says_it_all or f"{type(error).__name__}: {error}") from error
