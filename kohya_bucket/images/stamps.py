"""Whether a file is unchanged: by its stamp, or by a hash of its content."""

from __future__ import annotations

import hashlib
import os
import stat

from kohya_bucket.checks import digest
from kohya_bucket.errors import FileChangedError, KohyaBucketError
from kohya_bucket.images.formats import explain_os_error
from kohya_bucket.images.remote import is_url, read_remote, stamp_remote
from kohya_bucket.inputs import open_input

Stamp = tuple[int, int]
"""(bytes, mtime_ns) of a file; the latter is 0 if its storage does not tell."""


def stamp_of(path: str) -> Stamp:
    """The stamp of a file or URL, see `stamp_remote`. `OSError` if it is missing or not a regular file."""
    if is_url(path):
        return stamp_remote(path)
    try:
        status = os.stat(path)
    except ValueError as error:
        raise OSError(f"not a usable path ({error})") from None
    if not stat.S_ISREG(status.st_mode):  # opening a pipe blocks
        raise OSError("not a regular file")
    return status.st_size, status.st_mtime_ns


def stamp_or_refuse(path: str) -> Stamp:
    """`stamp_of`, with a `KohyaBucketError` for a path that the user named."""
    try:
        return stamp_of(path)
    except OSError as error:
        raise KohyaBucketError(f"{path}: cannot be read ({explain_os_error(error)})") from None


def check_unchanged(path: str, current: Stamp, stamp: Stamp) -> None:
    """Raises `FileChangedError` for a file whose stamp has changed."""
    if current != stamp:
        raise FileChangedError(
            f"{path}: changed since it was scanned, so its images may lie elsewhere: run again, which scans it again"
        )


def read_unchanged(path: str, stamp: Stamp | None, offset: int, length: int) -> bytes:
    """`length` bytes from `offset` of a file that still has its stamp after they were read; None: any stamp.

    Raises:
        OSError: it cannot be read.
        KohyaBucketError: it has changed, or is too short.
    """
    if is_url(path):
        data = read_remote(path, offset, offset + length) if length else b""
        current = stamp and stamp_of(path)  # costs a request
    else:
        with open_input(path) as file:
            file.seek(offset)
            data = file.read(length)
            status = os.fstat(file.fileno())
        current = status.st_size, status.st_mtime_ns
    if stamp and current:
        check_unchanged(path, current, stamp)
    if len(data) != length:
        raise KohyaBucketError(
            f"{path}: gave {len(data)} of {length} bytes from {offset} on: it is truncated, copy it again"
        )
    return data


HASH_LENGTH = 32
_PIECE = 1 << 20


def hash_file(path: str) -> str:
    """BLAKE2b of the file's bytes, 128 bits as 32 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    if is_url(path):
        return hash_bytes(read_remote(path))
    state = hashlib.blake2b(digest_size=HASH_LENGTH // 2)
    with open_input(path) as file:
        while piece := file.read(_PIECE):
            state.update(piece)
    return state.hexdigest()


def hash_bytes(data: bytes) -> str:
    """`hash_file` for bytes in memory."""
    return digest(data, size=HASH_LENGTH // 2)
