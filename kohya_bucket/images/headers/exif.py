"""The orientation tag of an EXIF block (a TIFF structure), without reading the rest of it."""

from __future__ import annotations

import struct

__all__ = ["orientation_of"]

_SHORT = 3
_ENTRY = 12
# Per byte order: how a long and a short are stored, an entry's kind and value, and the orientation's tag.
_LAYOUTS = {
    b"II": (struct.Struct("<I"), struct.Struct("<H"), struct.Struct("<2xH4xH"), b"\x12\x01"),
    b"MM": (struct.Struct(">I"), struct.Struct(">H"), struct.Struct(">2xH4xH"), b"\x01\x12"),
}


def orientation_of(tiff: bytes) -> int:
    """EXIF orientation, 1 to 8, from a TIFF block; 1 (stored upright) where there is none or it is damaged."""
    layout = _LAYOUTS.get(tiff[:2])
    if layout is None or len(tiff) < 8:
        return 1
    place, number, entry, tag = layout
    first = place.unpack_from(tiff, 4)[0]
    if first + 2 > len(tiff):
        return 1
    start = first + 2
    end = start + _ENTRY * min(number.unpack_from(tiff, first)[0], (len(tiff) - start) // _ENTRY)
    at = tiff.find(tag, start, end)
    while at >= 0 and (at - start) % _ENTRY:  # these bytes within another entry
        at = tiff.find(tag, at + 1, end)
    if at < 0:
        return 1
    kind, value = entry.unpack_from(tiff, at)
    return value if kind == _SHORT and 1 <= value <= 8 else 1
