"""Pieces of an image, whether it is an open file, bytes in memory, or something that can be read in pieces."""

from __future__ import annotations

import io
import os
from typing import Any, Protocol

from kohya_bucket.images.formats import UnreadableImageError

HEAD_BYTES = 4096
"""What is read first of every file; a shorter head is the whole file."""

MAX_HEADER_BYTES = 1 << 28
"""What is read of one file at most until its size is known; some decoders want all of it first."""

_BUFFER = 1 << 16
_READ_COSTS = 1 << 10  # a header in steps of one byte, of which a decoder makes millions in what is no picture


class Pieces(Protocol):
    """A file that is read in pieces, wherever it lies."""

    @property
    def length(self) -> int:
        """Bytes in all."""

    def read_at(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer at the end."""


class Region:
    """A file inside another, such as a member of a tar: `length` bytes from `start`."""

    def __init__(self, source: Source, start: int, length: int) -> None:
        self._source, self._start, self.length = source, start, length

    def read_at(self, offset: int, length: int) -> bytes:
        if offset >= self.length:
            return b""
        return read_at(self._source, self._start + offset, min(length, self.length - offset))


Source = int | bytes | io.BufferedReader | Pieces
"""An open file or its descriptor, a whole file in memory, or anything that is read in pieces."""


def _seek_and_read(fd: int, length: int, offset: int) -> bytes:
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, length)


_read_fd = getattr(os, "pread", _seek_and_read)  # Windows has no call that does both


def read_at(source: Source, offset: int, length: int) -> bytes:
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


def length_of(source: Source) -> int:
    """Bytes in all."""
    if isinstance(source, int):
        return os.lseek(source, 0, os.SEEK_END)
    if isinstance(source, io.BufferedReader):
        return source.seek(0, os.SEEK_END)
    return len(source) if isinstance(source, bytes) else source.length


class RawFile(io.RawIOBase):
    """The same as an open file without a buffer."""

    def __init__(self, source: Source) -> None:
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
    """The same as an open file, for a decoder that looks for the size in it: nothing is read that is not asked for.

    Whoever asks for more than `MAX_HEADER_BYTES`, all reads together, gets an `UnreadableImageError`.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(RawFile(source), _BUFFER)
        self._length, self._left = length_of(source), MAX_HEADER_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0 or size > _BUFFER:
            there = max(0, self._length - self.tell())
            whole = size is None or not 0 <= size < there
            self._spend(there if whole else size or 0)
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
                f"its size was not found after reading {MAX_HEADER_BYTES >> 20} MiB of {self._length:,} bytes: "
                "damaged, or not an image"
            )
