"""Sizes and orientations by Pillow, which decides wherever the header readers are unsure."""

from __future__ import annotations

import functools
import importlib
import io
import os
from collections.abc import Iterator
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from kohya_bucket.images.formats import MAX_SIDE, ImageFormat, UnreadableImageError, explain_os_error, in_short

_FORMATS = {
    "PNG": ImageFormat.PNG,
    "JPEG": ImageFormat.JPEG,
    "MPO": ImageFormat.JPEG,
    "WEBP": ImageFormat.WEBP,
    "GIF": ImageFormat.GIF,
    "BMP": ImageFormat.BMP,
    "DIB": ImageFormat.BMP,
    "TIFF": ImageFormat.TIFF,
    "AVIF": ImageFormat.AVIF,
    "HEIF": ImageFormat.HEIC,
    "JXL": ImageFormat.JXL,
}
_PLUGINS = {
    ImageFormat.AVIF: ("pillow_avif", "pillow-avif-plugin, or Pillow 11.3 or newer"),
    ImageFormat.HEIC: ("pillow_heif", "pillow-heif"),
    ImageFormat.JXL: ("pillow_jxl", "pillow-jxl-plugin"),
}
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""The transposition that turns an image upright, by EXIF orientation."""

# Pillow and pillow-heif turn these upright themselves, including their size.
_TURNED_BY_PILLOW = (ImageFormat.TIFF, ImageFormat.HEIC)
_METADATA = (b"eXIf", b"tEXt", b"zTXt", b"iTXt", b"iCCP")
PNG_HEADER = 33
_NO_PIXELS = b"\0\0\0\0IDAT\x35\xaf\x06\x1e\0\0\0\0IEND\xae\x42\x60\x82"
TOO_MUCH_TEXT = "its text or profile is larger than Pillow reads (PIL.PngImagePlugin.MAX_TEXT_CHUNK)"


@functools.cache
def load_plugin(kind: ImageFormat) -> bool:
    """Register the Pillow plugin that a format may need; returns whether the format can be read."""
    if kind not in _PLUGINS:
        return True
    Image.init()
    if kind.name in Image.OPEN:
        return True
    try:
        plugin = importlib.import_module(_PLUGINS[kind][0])
    except ImportError:
        return False
    if kind is ImageFormat.HEIC:
        plugin.register_heif_opener()
    return True


def open_with_pillow(file: BinaryIO, kind: ImageFormat) -> tuple[int, int, int, ImageFormat]:
    """(width, height, orientation, format) from Pillow; no pixels are decoded.

    Raises:
        UnreadableImageError: Pillow cannot open the file.
    """
    has_plugin = load_plugin(kind)
    try:
        with Image.open(file) as image:
            width, height = image.size
            refuse_large(width, height)
            actual = _FORMATS.get(image.format or "", ImageFormat.OTHER)
            orientation = orientation_in(_metadata(image, file) if actual is ImageFormat.PNG else image)
            return width, height, 1 if actual in _TURNED_BY_PILLOW else orientation, actual
    except UnreadableImageError:
        raise
    except UnidentifiedImageError:
        if not has_plugin:
            raise UnreadableImageError(f"{kind.name} needs a Pillow plugin: pip install {_PLUGINS[kind][1]}") from None
        if kind is ImageFormat.UNKNOWN:
            raise UnreadableImageError(f"not an image ({_first_bytes(file)})") from None
        raise UnreadableImageError(f"its {kind.name} header is damaged or cut off") from None
    except Image.DecompressionBombError:
        raise UnreadableImageError(too_many_pixels(pixel_limit() or 0)) from None
    except OSError as error:
        raise UnreadableImageError(explain_os_error(error)) from None
    except Exception as error:
        if any(words in str(error) for words in ("MAX_TEXT", "Decompressed Data Too Large")):  # the latter in Pillow 9
            raise UnreadableImageError(TOO_MUCH_TEXT) from None
        # Plugins raise anything on damaged data.
        why = f"{type(error).__name__}: {in_short(error)}"
        raise UnreadableImageError(f"its {kind.name} header is damaged ({why})") from None


def pixel_limit() -> int | None:
    """Pixels above which `Image.open` refuses a file; None without a limit."""
    limit = Image.MAX_IMAGE_PIXELS
    return None if limit is None else 2 * limit


def refuse_large(width: int, height: int) -> None:
    """Raises `UnreadableImageError` for a size that Pillow refuses, or that does not fit into arrays of sizes."""
    if width > MAX_SIDE or height > MAX_SIDE:
        raise UnreadableImageError(f"claims to have {width:,}x{height:,} pixels")
    limit = pixel_limit()
    if limit is not None and width * height > limit:
        raise UnreadableImageError(too_many_pixels(limit))


def too_many_pixels(limit: int) -> str:
    """The reason for an image with more pixels than Pillow's limit."""
    return f"more than {limit:,} pixels, which Pillow refuses (PIL.Image.MAX_IMAGE_PIXELS)"


def orientation_in(image: Image.Image) -> int:
    """The orientation that `PIL.ImageOps.exif_transpose` applies, 1 to 8, by EXIF or else XMP; 1 if unreadable."""
    try:
        # PNG's own method would decode the pixels, to find a block behind them.
        value = Image.Image.getexif(image).get(ORIENTATION, 1)
        return int(value) if value in TURNS else 1
    except Exception:  # damaged blocks raise anything
        return 1


def _metadata(image: Image.Image, file: BinaryIO) -> Image.Image:
    """A PNG with the texts and EXIF blocks of an open one, including those behind its pixels, but no pixels."""
    file.seek(0)
    parts, animated, pixels = [file.read(PNG_HEADER)], getattr(image, "is_animated", False), False
    for name, at, length in chunks_of_png(file):
        pixels |= name == b"IDAT"
        if pixels and animated and name == b"fcTL":  # Pillow reads no further
            break
        if name in _METADATA:
            file.seek(at)
            parts.append(file.read(length))
    return Image.open(io.BytesIO(b"".join([*parts, _NO_PIXELS])))


def chunks_of_png(file: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """(name, offset, length in all) of the chunks between a PNG's header and its end."""
    at = PNG_HEADER
    while True:
        file.seek(at)
        head = file.read(8)
        if len(head) < 8 or head[4:] == b"IEND":
            return
        length = 12 + int.from_bytes(head[:4], "big")
        yield head[4:], at, length
        at += length


def _first_bytes(file: BinaryIO) -> str:
    try:
        file.seek(0)
        head = file.read(8)
        return f"its first bytes are {head.hex(' ')}, {file.seek(0, os.SEEK_END)} bytes in all"
    except OSError as error:
        return explain_os_error(error)
