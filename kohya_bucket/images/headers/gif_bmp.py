"""GIF and BMP: two small fixed headers."""

from __future__ import annotations

from kohya_bucket.images.files.pieces import Source
from kohya_bucket.images.formats import HeaderRow, ImageFormat

__all__ = ["read_bmp", "read_gif"]

_int = int.from_bytes
_GIF, _BMP = int(ImageFormat.GIF), int(ImageFormat.BMP)
_BMP_HEADERS = frozenset((40, 108, 124))


def read_gif(head: bytes, _: Source) -> HeaderRow | None:
    """(width, height, 1, format), or None where only a full decoder can tell.

    The screen's size, enlarged where the first frame reaches beyond it, as Pillow does; extensions between
    the two must lie in `head`.
    """
    if len(head) < 13 or not head.startswith((b"GIF87a", b"GIF89a")):
        return None
    at = 13
    if head[10] & 0x80:
        at += 3 << (head[10] & 7) + 1
    while at + 10 <= len(head):
        if head[at] == 0x2C:
            left, top, width, height = (_int(head[i : i + 2], "little") for i in range(at + 1, at + 9, 2))
            return max(_int(head[6:8], "little"), left + width), max(_int(head[8:10], "little"), top + height), 1, _GIF
        if head[at] != 0x21:
            return None
        at += 2
        while at < len(head) and head[at]:
            at += 1 + head[at]
        at += 1
    return None


def read_bmp(head: bytes, _: Source) -> HeaderRow | None:
    """(width, height, 1, format) of a plain 24 or 32 bit BMP; None for palettes, compression and old headers."""
    header = _int(head[14:18], "little")
    if header not in _BMP_HEADERS or len(head) < 14 + header:
        return None
    if head[26:28] != b"\1\0" or head[28:30] not in (b"\x18\0", b"\x20\0") or head[30:34] != b"\0\0\0\0":
        return None
    if 0x80 <= head[25] < 0xFF or head[21] >= 0x80:
        return None
    return _int(head[18:22], "little"), abs(_int(head[22:26], "little", signed=True)), 1, _BMP
