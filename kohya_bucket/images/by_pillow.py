"""What Pillow says about a file: the judge wherever the small header readers are unsure."""

from __future__ import annotations

import functools
import importlib
import os
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


@functools.cache
def load_plugin(kind: ImageFormat) -> bool:
    """Register the Pillow plugin for a format that Pillow may not know by itself, if it is installed."""
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
            found = _FORMATS.get(image.format or "", ImageFormat.OTHER)
            return width, height, _orientation(image, found), found
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
        # Plugins of Pillow raise whatever their parsing of damaged data ran into.
        raise UnreadableImageError(
            f"its {kind.name} header is damaged ({type(error).__name__}: {in_short(error)})"
        ) from None


def pixel_limit() -> int | None:
    """Pixels beyond which `Image.open` refuses a file; None if the limit was switched off."""
    limit = Image.MAX_IMAGE_PIXELS
    return None if limit is None else 2 * limit


def refuse_large(width: int, height: int) -> None:
    """Raises `UnreadableImageError` for a size that Pillow refuses, or that arrays of sizes do not hold."""
    if width > MAX_SIDE or height > MAX_SIDE:
        raise UnreadableImageError(f"claims to have {width:,}x{height:,} pixels")
    limit = pixel_limit()
    if limit is not None and width * height > limit:
        raise UnreadableImageError(too_many_pixels(limit))


def too_many_pixels(limit: int) -> str:
    return f"more than {limit:,} pixels, which Pillow refuses (PIL.Image.MAX_IMAGE_PIXELS)"


def _orientation(image: Image.Image, kind: ImageFormat) -> int:
    # Pillow and pillow-heif turn these upright themselves, size included; nothing is left to rotate.
    if kind in (ImageFormat.TIFF, ImageFormat.HEIC):
        return 1
    try:
        # PNG would decode its pixels first, in search of an EXIF block behind them.
        value = image.getexif().get(ORIENTATION, 1) if kind is not ImageFormat.PNG or "exif" in image.info else 1
    except Exception:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _first_bytes(file: BinaryIO) -> str:
    try:
        file.seek(0)
        head = file.read(8)
        return f"its first bytes are {head.hex(' ')}, {file.seek(0, os.SEEK_END)} bytes in all"
    except OSError as error:
        return explain_os_error(error)
