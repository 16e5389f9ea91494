"""Pieces of an image, whether it is an open file, bytes in memory, or something that can be read in pieces."""

from __future__ import annotations

import os
from typing import Protocol

__all__ = ["HEAD_BYTES", "Pieces", "Region", "Source", "length_of", "read_at"]

HEAD_BYTES = 4096
"""What is read first of every file; a shorter head is the whole file."""


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
