"""A short hash of a file's content, to find duplicates and to notice edits that kept time and length."""

from __future__ import annotations

import hashlib

from kohya_bucket.images.files.remote import is_url, read_remote

__all__ = ["HASH_LENGTH", "hash_bytes", "hash_file"]

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
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            state.update(piece)
    return state.hexdigest()


def hash_bytes(data: bytes) -> str:
    """The same of a file in memory."""
    return hashlib.blake2b(data, digest_size=HASH_LENGTH // 2).hexdigest()
