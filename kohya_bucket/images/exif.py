"""The orientation tag of an EXIF block (a TIFF structure), without reading the rest of it."""

from __future__ import annotations

import struct

__all__ = ["orientation_of"]

_ORIENTATION = 0x0112
_SHORT = 3
# Per byte order: where the first directory is, how many entries it has, and one entry of 12 bytes.
_LAYOUTS = {
    order: tuple(struct.Struct(order_sign + layout) for layout in ("I", "H", "HHIHH"))
    for order, order_sign in ((b"II", "<"), (b"MM", ">"))
}


def orientation_of(tiff: bytes) -> int:
    """EXIF orientation, 1 to 8, from a TIFF block; 1 (stored upright) where there is none or it is damaged."""
    layouts = _LAYOUTS.get(tiff[:2])
    if layouts is None or len(tiff) < 8:
        return 1
    place, number, entry = layouts
    first = place.unpack_from(tiff, 4)[0]
    if first + 2 > len(tiff):
        return 1
    start = first + 2
    count = min(number.unpack_from(tiff, first)[0], (len(tiff) - start) // 12)
    for tag, kind, _, value, _ in entry.iter_unpack(tiff[start : start + 12 * count]):
        if tag == _ORIENTATION:
            return value if kind == _SHORT and 1 <= value <= 8 else 1
    return 1
