"""Pieces of an image, whether it is an open file, bytes in memory, or something that can be read in pieces."""

from __future__ import annotations

import io
import os
from typing import Any, Protocol

__all__ = ["HEAD_BYTES", "Pieces", "Region", "Source", "as_file", "length_of", "read_at"]

HEAD_BYTES = 4096
"""What is read first of every file; a shorter head is the whole file."""

_BUFFER = 1 << 16


class Pieces(Protocol):
    """A file that is read in pieces, wherever it lies."""

    @property
    def length(self) -> int:
        """Bytes in all."""

    def read_at(self, offset: int, length: int) -> bytes:
        """At most `length` bytes from `offset`; fewer at the end."""


class Region:
    """A file inside an open file, such as a member of a tar: `length` bytes from `start`."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self.length = fd, start, length

    def read_at(self, offset: int, length: int) -> bytes:
        if offset >= self.length:
            return b""
        return read_at(self._fd, self._start + offset, min(length, self.length - offset))


class _RawFile(io.RawIOBase):
    def __init__(self, pieces: Pieces) -> None:
        self._pieces, self._at = pieces, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._pieces.length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._pieces.read_at(self._at, len(buffer))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        data = self._pieces.read_at(self._at, max(0, self._pieces.length - self._at))
        self._at += len(data)
        return data


def as_file(pieces: Pieces) -> io.BufferedReader:
    """The same as an open file, for a reader that expects one: nothing is read that is not asked for."""
    return io.BufferedReader(_RawFile(pieces), _BUFFER)


Source = int | bytes | Pieces
"""An open file descriptor, a whole file in memory, or anything that is read in pieces."""


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
    return source.read_at(offset, length)


def length_of(source: Source) -> int:
    """Bytes in all."""
    if isinstance(source, int):
        return os.lseek(source, 0, os.SEEK_END)
    return len(source) if isinstance(source, bytes) else source.length
