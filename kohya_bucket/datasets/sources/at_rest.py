"""Cells that wait in a buffer: a thousand of them hold no thousand files open."""

from __future__ import annotations

import io
from typing import Any

from PIL import Image, ImageFile

from kohya_bucket.images.pixels import NO_IMAGE

__all__ = ["at_rest"]


def at_rest(cell: Any) -> Any:
    """The cell, or an equal one that holds no file: Pillow keeps that of an image open until it is decoded.

    Such an image is read into memory as it lies in its file. Where that would not give the same one again (a later
    frame, a JPEG that is to be decoded smaller), or the file cannot be read anew, it is decoded. What is broken stays
    as it is, for whoever decodes it to find. The image itself may be somebody else's, and is not closed.
    """
    file = getattr(cell, "fp", None) if isinstance(cell, ImageFile.ImageFile) else None
    if file is None or isinstance(file, io.BytesIO):
        return cell
    try:
        return _from_memory(cell, file) or cell.copy()
    except (*NO_IMAGE, EOFError):
        return cell


def _from_memory(image: ImageFile.ImageFile, file: Any) -> Image.Image | None:
    try:
        place = file.tell()
        file.seek(0)
        encoded = file.read()
        file.seek(place)
        again = Image.open(io.BytesIO(encoded), formats=[str(image.format)])
    except (OSError, ValueError, SyntaxError, KeyError):
        return None
    same = (again.size, again.mode, again.tell()) == (image.size, image.mode, image.tell())
    return again if same else None
