"""PNG: size from the IHDR chunk, orientation from an eXIf chunk before the pixels."""

from __future__ import annotations

import struct
from zlib import crc32

from kohya_bucket.images.files.pieces import Source, read_at
from kohya_bucket.images.formats import HeaderRow, ImageFormat
from kohya_bucket.images.headers.exif import orientation_of

__all__ = ["read_png"]

_DEPTH_AND_COLOR = frozenset(
    depth << 8 | color
    for depth, color in [
        (1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (8, 2), (16, 2),
        (1, 3), (2, 3), (4, 3), (8, 3), (8, 4), (16, 4), (8, 6), (16, 6),
    ]
)  # fmt: skip
_MAX_CHUNKS = 256
_MAX_EXIF = 1 << 16
_PNG = int(ImageFormat.PNG)
_begin = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
# Signature and IHDR: its beginning, width, height, depth and colour, filter, checksum; then the next chunk's name.
_header = struct.Struct(">16sIIHxBxI4x4s").unpack_from
_HEADER_BYTES = 41
_chunk = struct.Struct(">I4s").unpack_from


def read_png(head: bytes, source: Source) -> HeaderRow | None:
    """(width, height, orientation, format), or None where only a full decoder can tell.

    The header's checksum must be right and the pixels (IDAT) must begin inside the file, as decoders demand.
    """
    if len(head) < _HEADER_BYTES:
        return None
    begin, width, height, depth_and_color, filtering, checksum, next_chunk = _header(head)
    if begin != _begin or depth_and_color not in _DEPTH_AND_COLOR or filtering or crc32(head[12:29]) != checksum:
        return None
    if next_chunk == b"IDAT":
        return width, height, 1, _PNG
    orientation = _walk(head, source)
    return None if orientation is None else (width, height, orientation, _PNG)


def _walk(head: bytes, source: Source) -> int | None:
    """Follow the chunks up to IDAT; the orientation met on the way, None if IDAT is not reached."""
    orientation = 1
    at = 33
    for _ in range(_MAX_CHUNKS):
        if at + 8 <= len(head):
            length, name = _chunk(head, at)
        elif len(chunk := read_at(source, at, 8)) == 8:
            length, name = _chunk(chunk)
        else:
            return None
        if name == b"IDAT":
            return orientation
        if name == b"eXIf":
            orientation = orientation_of(read_at(source, at + 8, min(length, _MAX_EXIF)))
        at += 12 + length
    return None
