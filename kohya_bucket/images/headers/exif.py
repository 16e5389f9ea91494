"""The orientation tag of an EXIF block (a TIFF structure), without reading the rest of it."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable

__all__ = ["ORIENTATIONS", "orientation_of", "say_orientations"]

ORIENTATIONS = {
    2: "mirrored left to right",
    3: "upside down",
    4: "mirrored top to bottom",
    5: "mirrored, a quarter turn",
    6: "a quarter turn clockwise",
    7: "mirrored, a quarter turn",
    8: "a quarter turn anticlockwise",
}
"""What each value asks for that is not 1; sd-scripts does none of it."""

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


def say_orientations(orientations: Iterable[int]) -> str:
    """What EXIF asks for, with counts where it is several images: "12 a quarter turn clockwise; 3 upside down"."""
    counts = Counter(ORIENTATIONS[value] for value in orientations if value in ORIENTATIONS)
    return "; ".join(f"{count:,} {text}" for text, count in counts.most_common())
