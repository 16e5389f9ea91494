"""The one place where input is opened: regular files only, and of what is read whole no more than such a file holds.

Whoever made a file may have put a pipe, a device or a folder in its place, or a hole of many gigabytes into it.
"""

from __future__ import annotations

import errno
import io
import os
import stat

from kohya_bucket.errors import OddFileError, TooLongError, may_pass

MAX_CAPTION_BYTES = 1 << 20
MAX_CONFIG_BYTES = 1 << 26
MAX_TABLE_BYTES = 1 << 30
"""Of lists, tables and rows that are read whole: ten million lines of a hundred bytes."""

# Opening a named pipe must not wait for a writer, and Windows must not translate line ends.
READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_SMALL = 1 << 16

Name = str | os.PathLike[str]


def open_input(path: Name) -> io.BufferedReader:
    """A file to read from.

    Raises:
        OddFileError: a folder, a pipe or a device.
        OSError: it is missing or cannot be opened.
    """
    fd = _descriptor(path)
    try:
        _check(os.fstat(fd), path)
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_input(path: Name, limit: int) -> bytes:
    """The whole of a file that has at most `limit` bytes.

    Raises:
        OddFileError: a folder, a pipe, a device, or longer than that.
        OSError: it is missing or cannot be read.
    """
    with open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= limit:
            data = file.read(size + 1)
            if len(data) <= size:
                return data
            data += file.read(max(0, limit - size))  # it grows, or lies in a file system that states no lengths
            size = len(data)
        if size > limit:
            raise too_long(path, size, limit)
        return data


def read_small(path: Name, limit: int) -> bytes | None:
    """The same of one of many small files, with few calls of the system; None where there is no regular file.

    Raises:
        OSError: it cannot be read, it cannot be told whether it is there, or it is longer than `limit`.
    """
    try:
        fd = os.open(path, READING)
    except (OSError, ValueError):
        if may_be_file(path):
            raise
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size > limit:
            raise too_long(path, status.st_size, limit)
        data = os.read(fd, _SMALL)
        if len(data) < _SMALL:
            return data
    finally:
        os.close(fd)
    return read_input(path, limit)


def may_be_file(path: Name) -> bool:
    """Whether a regular file lies there, or it cannot be told now."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except ValueError:  # a name that no file can have
        return False
    except OSError as error:
        return may_pass(error) and error.errno != errno.EINVAL


def too_long(path: Name, size: int, limit: int) -> TooLongError:
    """The error for a file of `size` bytes."""
    why = f"{size:,} bytes long, but such a file has {limit:,} at most"
    return TooLongError(errno.EFBIG, why, os.fspath(path))


def _descriptor(path: Name) -> int:
    try:
        return os.open(path, READING)
    except ValueError as error:  # a name that no file can have
        raise OSError(errno.EINVAL, f"not a usable path ({error})", os.fspath(path)) from None
    except PermissionError:
        if os.path.isdir(path):  # as Windows says of folders
            raise _odd(path, "a folder") from None
        raise


def _check(status: os.stat_result, path: Name) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise _odd(path, "a folder")
    if not stat.S_ISREG(status.st_mode):
        raise _odd(path, "a pipe or a device")


def _odd(path: Name, what: str) -> OddFileError:
    return OddFileError(errno.EINVAL, what, os.fspath(path))
