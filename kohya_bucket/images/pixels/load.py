"""Pixels of an image file as sd-scripts loads them: unrotated.

Source: `load_image` of kohya-ss/sd-scripts.
"""

from __future__ import annotations

from os import PathLike

import numpy as np
from PIL import Image, UnidentifiedImageError

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.headers.by_pillow import load_plugin_for
from kohya_bucket.images.pixels.resize import Pixels

__all__ = ["load_pixels", "to_pixels"]


def load_pixels(path: str | PathLike[str], alpha: bool = False, *, writable: bool = True) -> Pixels:
    """Load an image as [H, W, 3] RGB or, with `alpha`, [H, W, 4] RGBA, uint8.

    EXIF orientation is ignored, as in sd-scripts, so that [H, W] are the sizes in the file's header. Without
    `writable` a copy is saved, and the array may be read-only.

    Raises:
        KohyaBucketError: the file is missing, broken or no image.
    """
    try:
        try:
            with Image.open(path) as image:
                return to_pixels(image, alpha, writable=writable)
        except UnidentifiedImageError:
            with open(path, "rb") as file:
                load_plugin_for(file.read(64))
            with Image.open(path) as image:
                return to_pixels(image, alpha, writable=writable)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise KohyaBucketError(f"{path}: cannot be read as an image ({error}); repair or remove the file") from error


def to_pixels(image: Image.Image, alpha: bool = False, *, writable: bool = True) -> Pixels:
    """A Pillow image as [H, W, 3] RGB or [H, W, 4] RGBA uint8."""
    mode = "RGBA" if alpha else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    return np.array(image, dtype=np.uint8) if writable else np.asarray(image, dtype=np.uint8)
