"""WebP in its three kinds: lossy (VP8), lossless (VP8L) and extended (VP8X: alpha, EXIF, ICC, animation).

The canvas of an extended file is stored minus one in 24 bits per side; reading it without adding one is the
known defect of imagesize 1.4.1.
"""

from __future__ import annotations

import struct

from kohya_bucket.images.files.pieces import HEAD_BYTES, Source, length_of, read_at
from kohya_bucket.images.formats import HeaderRow, ImageFormat
from kohya_bucket.images.headers.exif import orientation_of

__all__ = ["read_webp"]

_HAS_EXIF = 0x08
_CANVAS_BYTES = 10
_FIRST_CHUNK = 30
_MAX_CHUNKS = 64
# A chunk's name and length, and most EXIF blocks whole.
_LOOK = 2048
_MAX_EXIF = 1 << 16
_MARK = b"Exif\0\0"  # some programs keep what precedes the block in JPEG files
_header = struct.Struct("<4sI4s4sIB").unpack_from
_chunk = struct.Struct("<4sI").unpack_from
_int = int.from_bytes
_WEBP = int(ImageFormat.WEBP)


def read_webp(head: bytes, source: Source) -> HeaderRow | None:
    """(width, height, orientation, format), or None where only a full decoder can tell (a truncated file, say)."""
    reached = len(head)
    if reached < 30:
        return None
    riff, end, webp, kind, length, first = _header(head)  # first: of the chunk's bytes
    if riff != b"RIFF" or webp != b"WEBP":
        return None
    end += 8
    orientation = 1
    if kind == b"VP8X":
        if length != _CANVAS_BYTES:
            return None
        if first & _HAS_EXIF:
            reached, orientation = _orientation(head, source)
    if reached < end and (reached < HEAD_BYTES or length_of(source) < end):
        return None
    if kind == b"VP8X":
        return _int(head[24:27], "little") + 1, _int(head[27:30], "little") + 1, orientation, _WEBP
    if kind == b"VP8 ":
        shown_key_frame = first & 0x11 == 0x10
        if not shown_key_frame or head[23:26] != b"\x9d\x01\x2a":
            return None
        return _int(head[26:28], "little") & 0x3FFF, _int(head[28:30], "little") & 0x3FFF, 1, _WEBP
    if kind == b"VP8L":
        bits = _int(head[21:25], "little")
        if first != 0x2F or bits >> 29:
            return None
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1, _WEBP
    return None


def _orientation(head: bytes, source: Source) -> tuple[int, int]:
    """(how far the file was seen to reach, the orientation)."""
    at, start, reached = _FIRST_CHUNK, 0, len(head)
    for _ in range(_MAX_CHUNKS):
        if at + 8 > reached:
            if reached < HEAD_BYTES:
                break
            head, start = read_at(source, at, _LOOK), at
            reached = at + len(head)
            if at + 8 > reached:
                break
        name, length = _chunk(head, at - start)
        at += 8
        if name == b"EXIF":
            if at + length > reached:
                head, start = read_at(source, at, min(length, _MAX_EXIF)), at
            if head.startswith(_MARK, at - start):
                at, length = at + len(_MARK), length - len(_MARK)
            return reached, orientation_of(head[at - start : at - start + length])
        at += length + (length & 1)
    return reached, 1
