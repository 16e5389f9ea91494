"""JPEG: size from the frame header, orientation from the EXIF block before it.

What most encoders write is told by one match in place of nine steps of a walk. With the walk alone a scan of 50,000
small JPEG takes 1.16 times as long, one of a mixture with as many PNG and WebP 1.05 (`benchmarks/scan_tricks.py`).
"""

from __future__ import annotations

import re
import struct

from kohya_bucket.images.files.pieces import Source, read_at
from kohya_bucket.images.formats import HeaderRow, ImageFormat
from kohya_bucket.images.headers.exif import orientation_of

__all__ = ["read_jpeg", "walk_segments"]

_FRAME = frozenset((0xC0, 0xC1, 0xC2))
_SKIPPED = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
_SCAN = 0xDA
_APP1 = 0xE1
_MAX_SEGMENTS = 1024
_REFILL = 4096

# How most files begin: a JFIF block without a preview, and one of a program's or a camera's own, or one of the two.
_begin = re.compile(
    rb"\xff\xd8(?=\xff)(?:\xff\xe0\0\x10.{14})?(?:\xff[\xe1-\xef\xfe](..)((?<=\xe1..)Exif\0\0)?)?", re.DOTALL
).match
# One or two segments of quantization tables of 8 bits, and a frame header.
_FRAME_LAYOUT = (
    rb"\xff\xdb\x00(?:\x43[\0-\x0f].{64}(?:\xff\xdb\x00\x43[\0-\x0f].{64}|)|\x84[\0-\x0f].{64}[\0-\x0f].{64})"
    rb"\xff[\xc0-\xc2]\x00(?:\x0b\x08(?=.{4}\x01)|\x11\x08(?=.{4}\x03)|\x14\x08(?=.{4}\x04))"
    rb"(....)(?:\x01.{3}|\x03.{9}|\x04.{12})"
)
# The standard Huffman tables, recognised by their lengths, and a complete scan header; progressive files have others.
# Alternatives with nothing on one side are quicker here than repetitions.
_TABLES_LAYOUT = rb"\xff\xc4\x00\x1f.{29}\xff\xc4\x00\xb5.{179}"
_SCAN_LAYOUT = rb"(" + _TABLES_LAYOUT + rb"(?:" + _TABLES_LAYOUT + rb"|)\xff\xda\x00(?:\x08.{6}|\x0c.{10}|\x0e.{12})|)"
_usual = re.compile(_FRAME_LAYOUT + _SCAN_LAYOUT, re.DOTALL).match  # from the tables on
_short = struct.Struct(">H").unpack
_height_and_width = struct.Struct(">HH").unpack
_JPEG = int(ImageFormat.JPEG)


def read_jpeg(head: bytes, source: Source) -> HeaderRow | None:
    """(width, height, orientation, format), or None where only a full decoder can tell.

    Segments are followed up to the first scan, as decoders do; what lies between the headers (profiles,
    previews) is skipped without being read. Two frame headers, 12-bit samples, arithmetic coding, padding
    and anything else unusual are left to the decoder.
    """
    begin = _begin(head)
    if begin is None:
        return None
    orientation, at = 1, begin.end()
    if begin[1]:
        start = begin.end(1)
        at = start - 2 + _short(begin[1])[0]
        if begin[2]:
            orientation = _orientation(head, start + 6, at - start - 6, source, start + 6)
    usual = _usual(head, at)
    if usual is None:
        return walk_segments(head, source, at, orientation)
    height, width = _height_and_width(usual[1])
    if usual[2]:
        return width, height, orientation, _JPEG
    return walk_segments(head, source, usual.end(), orientation, (width, height))


def walk_segments(
    head: bytes, source: Source, at: int = 2, orientation: int = 1, size: tuple[int, int] | None = None
) -> HeaderRow | None:
    """The same by one segment after another from `at` on, with what was found before it."""
    base, end = 0, len(head)
    for _ in range(_MAX_SEGMENTS):
        if at + 10 > end:
            base += at
            head = read_at(source, base, _REFILL)
            at, end = 0, len(head)
            if end < 10:
                return None
        if head[at] != 0xFF:
            return None
        marker = head[at + 1]
        length = head[at + 2] << 8 | head[at + 3]
        if length < 2:
            return None
        if marker in _SKIPPED:
            if marker == _APP1 and head[at + 4 : at + 10] == b"Exif\0\0":
                orientation = _orientation(head, at + 10, length - 8, source, base + at + 10)
        elif marker in _FRAME:
            if size is not None or head[at + 4] != 8 or head[at + 9] not in (1, 3, 4):
                return None
            size = head[at + 7] << 8 | head[at + 8], head[at + 5] << 8 | head[at + 6]
        elif marker == _SCAN and size is not None and at + 2 + length <= end:
            return *size, orientation, _JPEG
        else:
            return None
        at += 2 + length
    return None


def _orientation(head: bytes, at: int, length: int, source: Source, offset: int) -> int:
    """Of the EXIF block of `length` bytes at `at` of `head`, which is at `offset` of the file."""
    block = head[at : at + length]
    return orientation_of(read_at(source, offset, length) if len(block) < length else block)
