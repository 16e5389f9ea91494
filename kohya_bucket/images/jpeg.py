"""JPEG: size from the frame header, orientation from the EXIF block before it."""

from __future__ import annotations

import re

from kohya_bucket.images.exif import orientation_of
from kohya_bucket.images.formats import HeaderRow, ImageFormat
from kohya_bucket.images.reading import Source, read_at

__all__ = ["read_jpeg"]

_FRAME = frozenset((0xC0, 0xC1, 0xC2))
_SKIPPED = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))
_SCAN = 0xDA
_TABLES = 0xDB
_MAX_SEGMENTS = 1024
_REFILL = 4096

# The layout that most encoders write, from the quantization tables to the first scan: tables of 8 bits, one
# frame header, the standard Huffman tables (recognised by their lengths), a complete scan header. One match
# stands for nine steps of the walk below; any other layout is walked.
_LAYOUT = (
    rb"(?:\xff\xdb\x00(?:\x43[\0-\x0f].{64}|\x84[\0-\x0f].{64}[\0-\x0f].{64})){1,4}"
    rb"\xff[\xc0-\xc2]\x00(?:\x0b\x08(?=.{4}\x01)|\x11\x08(?=.{4}\x03)|\x14\x08(?=.{4}\x04))"
    rb"(..)(..)(?:\x01.{3}|\x03.{9}|\x04.{12})"
    rb"(?:\xff\xc4\x00\x1f.{29}\xff\xc4\x00\xb5.{179}){1,2}"
    rb"\xff\xda\x00(?:\x08.{6}|\x0c.{10}|\x0e.{12})"
)
_usual = re.compile(_LAYOUT, re.DOTALL).match
# The same right behind a JFIF block without a preview: a whole file's header in one match.
_plain = re.compile(rb"\xff\xd8\xff\xe0\x00\x10.{14}" + _LAYOUT, re.DOTALL).match
_int = int.from_bytes
_JPEG = int(ImageFormat.JPEG)


def read_jpeg(head: bytes, source: Source) -> HeaderRow | None:
    """(width, height, orientation, format), or None where only a full decoder can tell.

    Segments are followed up to the first scan, as decoders do; what lies between the headers (profiles,
    previews) is skipped without being read. Two frame headers, 12-bit samples, arithmetic coding, padding
    and anything else unusual are left to the decoder.
    """
    if plain := _plain(head):
        return _int(plain[2], "big"), _int(plain[1], "big"), 1, _JPEG
    if not head.startswith(b"\xff\xd8\xff"):
        return None
    size = None
    orientation = 1
    at, base, end = 2, 0, len(head)
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
            if marker == _TABLES and size is None and (usual := _usual(head, at)):
                return _int(usual[2], "big"), _int(usual[1], "big"), orientation, _JPEG
            if marker == 0xE1 and head[at + 4 : at + 10] == b"Exif\0\0":
                block = head[at + 10 : at + 2 + length]
                if len(block) < length - 8:
                    block = read_at(source, base + at + 10, length - 8)
                orientation = orientation_of(block)
        elif marker in _FRAME:
            if size is not None or head[at + 4] != 8 or head[at + 9] not in (1, 3, 4):
                return None
            size = head[at + 7] << 8 | head[at + 8], head[at + 5] << 8 | head[at + 6]
        elif marker == _SCAN and size is not None and at + 2 + length <= end:
            return size[0], size[1], orientation, _JPEG
        else:
            return None
        at += 2 + length
    return None
