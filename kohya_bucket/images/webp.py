"""WebP in its three kinds: lossy (VP8), lossless (VP8L) and extended (VP8X: alpha, EXIF, ICC, animation).

The canvas of an extended file is stored minus one in 24 bits per side; reading it without adding one is the
known defect of imagesize 1.4.1.
"""

from __future__ import annotations

from kohya_bucket.images.exif import orientation_of
from kohya_bucket.images.formats import HeaderRow, ImageFormat
from kohya_bucket.images.reading import HEAD_BYTES, Source, length_of, read_at

__all__ = ["read_webp"]

_HAS_EXIF = 0x08
_MAX_CHUNKS = 64
# A chunk's name and length, and most EXIF blocks whole.
_LOOK = 2048
_MAX_EXIF = 1 << 16
_int = int.from_bytes
_WEBP = int(ImageFormat.WEBP)


def read_webp(head: bytes, source: Source) -> HeaderRow | None:
    """(width, height, orientation, format), or None where only a full decoder can tell (a truncated file, say)."""
    if len(head) < 30 or not head.startswith(b"RIFF") or head[8:12] != b"WEBP":
        return None
    if _int(head[4:8], "little") + 8 > (length_of(source) if len(head) == HEAD_BYTES else len(head)):
        return None
    kind = head[12:16]
    if kind == b"VP8X":
        orientation = _orientation(head, source) if head[20] & _HAS_EXIF else 1
        return _int(head[24:27], "little") + 1, _int(head[27:30], "little") + 1, orientation, _WEBP
    if kind == b"VP8 ":
        shown_key_frame = head[20] & 0x11 == 0x10
        if not shown_key_frame or head[23:26] != b"\x9d\x01\x2a":
            return None
        return _int(head[26:28], "little") & 0x3FFF, _int(head[28:30], "little") & 0x3FFF, 1, _WEBP
    if kind == b"VP8L":
        bits = _int(head[21:25], "little")
        if head[20] != 0x2F or bits >> 29:
            return None
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1, 1, _WEBP
    return None


def _orientation(head: bytes, source: Source) -> int:
    at, start = 12, 0
    for _ in range(_MAX_CHUNKS):
        here = at - start
        if here + 8 > len(head):
            if start == 0 and len(head) < HEAD_BYTES:
                break
            head, start, here = read_at(source, at, _LOOK), at, 0
            if len(head) < 8:
                break
        length = _int(head[here + 4 : here + 8], "little")
        if head[here : here + 4] == b"EXIF":
            block = head[here + 8 : here + 8 + length]
            if len(block) < length:
                block = read_at(source, at + 8, min(length, _MAX_EXIF))
            return orientation_of(block.removeprefix(b"Exif\0\0"))
        at += 8 + length + (length & 1)
    return 1
