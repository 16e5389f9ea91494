"""The stored size of one image file, from its header: what `PIL.Image.open(path).size` says, several times faster.

Stored means: before any rotation that EXIF asks for, since sd-scripts loads pixels unrotated.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from kohya_bucket.images.files.pieces import HEAD_BYTES, Pieces, Source, as_file, length_of, read_at
from kohya_bucket.images.files.remote import RemoteFile, is_url
from kohya_bucket.images.formats import HeaderRow, ImageFormat, sniff
from kohya_bucket.images.headers.jpeg import read_jpeg
from kohya_bucket.images.headers.png import read_png
from kohya_bucket.images.headers.webp import read_webp
from kohya_bucket.images.unreadable import UnreadableImageError, explain_os_error

__all__ = ["Header", "header_of", "read_header", "read_size"]

Reader = Callable[[bytes, Source], HeaderRow | None]


def _unknown(_: bytes, __: Source) -> HeaderRow | None:
    return None


# By the first byte; each reader looks at the rest of the signature itself.
_readers: list[Reader] = [_unknown] * 256
_readers[0x89], _readers[0xFF], _readers[ord("R")] = read_png, read_jpeg, read_webp
# A named pipe that happens to be called x.png must not block; Windows must not translate line ends.
_READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class Header(NamedTuple):
    """What the header of an image file says; `width` and `height` in pixels as stored."""

    width: int
    height: int
    orientation: int
    format: int


def read_header(path: str) -> HeaderRow:
    """(width, height, EXIF orientation 1 to 8, `ImageFormat`) of an image file.

    Raises:
        UnreadableImageError: the size cannot be told; the text says why.
    """
    try:
        fd = os.open(path, _READING)
    except (OSError, ValueError) as error:
        # Asked only now, so that ordinary paths pay nothing for it.
        if is_url(path):
            return _remote_header(path)
        raise UnreadableImageError(_why_unopened(path, error)) from None
    try:
        head = os.read(fd, HEAD_BYTES)
        if head and (found := _readers[head[0]](head, fd)) and found[0] and found[1]:
            return found
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UnreadableImageError("not a regular file")
        if not head:
            raise UnreadableImageError("an empty file (0 bytes)")
        return _by_pillow(fd, head)
    except OSError as error:
        raise UnreadableImageError(explain_os_error(error)) from None
    finally:
        os.close(fd)


def header_of(source: bytes | Pieces) -> HeaderRow:
    """The same for a file that is in memory, or a part of an open file.

    Raises:
        UnreadableImageError: the size cannot be told; the text says why.
        OSError: the open file cannot be read.
    """
    if not length_of(source):
        raise UnreadableImageError("an empty file (0 bytes)")
    head = read_at(source, 0, HEAD_BYTES)
    found = _readers[head[0]](head, source)
    if found and found[0] and found[1]:
        return found
    return _by_pillow(source, head)


def read_size(path: str | os.PathLike[str]) -> Header:
    """Header of one image file.

    Raises:
        ValueError: the size cannot be told; the text names the file and says why.
    """
    text = os.fspath(path)
    try:
        width, height, orientation, kind = read_header(text)
    except UnreadableImageError as error:
        raise ValueError(f"{text}: {error}") from None
    return Header(width, height, orientation, ImageFormat(kind))


def _by_pillow(source: Source, head: bytes) -> HeaderRow:
    # Imported late: most folders have no such file, and processes that help with a scan shall start quickly.
    from kohya_bucket.images.headers.by_pillow import open_with_pillow

    with as_file(source) as file:
        return open_with_pillow(file, sniff(head[:32]))


def _remote_header(url: str) -> HeaderRow:
    try:
        return header_of(RemoteFile(url))
    except OSError as error:
        raise UnreadableImageError(explain_os_error(error)) from None


def _why_unopened(path: str, error: OSError | ValueError) -> str:
    if isinstance(error, OSError):
        # Windows says "permission denied" for folders.
        return "a folder, not a file" if os.path.isdir(path) else explain_os_error(error)
    return f"not a usable path ({error})"
