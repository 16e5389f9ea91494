"""Pixels of an image file as sd-scripts loads them: unrotated, unless asked otherwise.

Source: `load_image` of kohya-ss/sd-scripts.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from os import PathLike, fspath
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.by_pillow import load_plugin_for
from kohya_bucket.images.pixels.jpeg import Fit, Pixels, decoded_by_simplejpeg, draft
from kohya_bucket.images.remote import fetched

__all__ = ["NO_IMAGE", "Picture", "load_picture", "load_pixels", "to_pixels"]

NO_IMAGE = (OSError, ValueError, SyntaxError, Image.DecompressionBombError)  # what Pillow raises for damaged files
_ORIENTATION = 0x0112
_ACROSS = (5, 6, 7, 8)  # orientations that exchange width and height


class Picture(NamedTuple):
    """Pixels, and of what.

    Attributes:
        pixels: [H, W, C] uint8; may be read-only.
        size: (width, height) of the whole image.
        scale: its sides were divided by this while it was decoded.
    """

    pixels: Pixels
    size: tuple[int, int]
    scale: int = 1

    @classmethod
    def whole(cls, pixels: Pixels) -> Picture:
        """Of an image that these are all pixels of."""
        return cls(pixels, (pixels.shape[1], pixels.shape[0]))


def load_pixels(
    path: str | PathLike[str], alpha: bool = False, fetch: Callable[[], str | bytes] | None = None
) -> Pixels:
    """Load a file, or what is behind a URL, as [H, W, 3] RGB or, with `alpha`, [H, W, 4] RGBA, uint8.

    `fetch` gives what is opened where it is neither: a part of the file that `path` names.

    The array may be read-only. EXIF orientation is ignored, as in sd-scripts, so that [H, W] are the sizes in the
    file's header.

    Raises:
        KohyaBucketError: the file is missing, broken or no image.
    """
    try:
        source = fetched(fspath(path)) if fetch is None else fetch()
        return load_picture(source, alpha=alpha).pixels
    except KohyaBucketError:
        raise
    except NO_IMAGE as error:
        raise KohyaBucketError(f"{path}: cannot be read as an image ({error}); repair or remove the file") from error


def load_picture(
    source: str | PathLike[str] | bytes, *, alpha: bool = False, obey_exif: bool = False, fit: Fit | None = None
) -> Picture:
    """Load a file, or its bytes.

    Args:
        alpha: as [H, W, 4] RGBA.
        obey_exif: turn the image upright.
        fit: what size an image of a given size (upright, if turned) will be resized to. A JPEG is then decoded at the
            smallest of 1/1, 1/2, 1/4 and 1/8 at which neither side is below that; None: whole.

    Raises:
        NO_IMAGE: the file is missing, broken or no image.
    """
    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(file) as image:
            return _picture(image, alpha, obey_exif, fit)
    except UnidentifiedImageError:
        if isinstance(source, bytes):
            head = source[:64]
        else:
            with open(source, "rb") as opened:
                head = opened.read(64)
        load_plugin_for(head)
        with Image.open(file) as image:
            return _picture(image, alpha, obey_exif, fit)


def _picture(image: Image.Image, alpha: bool, obey_exif: bool, fit: Fit | None) -> Picture:
    size, scale = image.size, 1
    orientation = image.getexif().get(_ORIENTATION, 1) if obey_exif and image.format in ("JPEG", "MPO") else 1
    if fit is not None:
        width, height = size
        if orientation in _ACROSS:
            height, width = fit((height, width))
        else:
            width, height = fit(size)
        scale = draft(image, (width, height), divides=orientation != 1)  # parts of pixels would come to lie elsewhere
    pixels = decoded_by_simplejpeg(image, alpha, scale) if orientation == 1 else None
    if pixels is None:
        pixels = to_pixels(_upright(image) if obey_exif else image, alpha)
    if scale == 1:
        return Picture.whole(pixels)
    return Picture(pixels, size[::-1] if orientation in _ACROSS else size, scale)


def _upright(image: Image.Image) -> Image.Image:
    image.load()  # TIFF is turned by it, and a PNG's EXIF may lie behind its pixels
    return image if image.getexif().get(_ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)


def to_pixels(image: Image.Image, alpha: bool = False) -> Pixels:
    """A Pillow image as [H, W, 3] RGB or [H, W, 4] RGBA uint8; the array may be read-only."""
    mode = "RGBA" if alpha else "RGB"
    return np.asarray(image if image.mode == mode else image.convert(mode), dtype=np.uint8)
