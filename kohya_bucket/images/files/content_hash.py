"""A short hash of a file's content, to find duplicates and to notice edits that kept time and length."""

from __future__ import annotations

import hashlib

from kohya_bucket.images.files.remote import is_url, read_remote

__all__ = ["HASH_LENGTH", "hash_file"]

HASH_LENGTH = 32
_PIECE = 1 << 20


def hash_file(path: str) -> str:
    """BLAKE2b of the file's bytes, 128 bits as 32 hexadecimal digits.

    Raises:
        OSError: the file cannot be read.
    """
    state = hashlib.blake2b(digest_size=HASH_LENGTH // 2)
    if is_url(path):
        state.update(read_remote(path))
        return state.hexdigest()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            state.update(piece)
    return state.hexdigest()
