"""JPEG pixels: whole, or decoded at a half, a quarter or an eighth, and by simplejpeg where it is installed.

libjpeg-turbo under simplejpeg takes half of Pillow's time, and gives the same bits (`benchmarks/pixels.py`). Pillow may
be built with another libjpeg, so a small picture is decoded by both before simplejpeg is trusted. Whatever it refuses
(it is stricter with damaged files) is left to Pillow.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = ["Fit", "decoded_by_simplejpeg", "draft"]

Pixels = npt.NDArray[np.uint8]
Fit = Callable[[tuple[int, int]], tuple[int, int]]  # from an image's size to that which it is resized to
_FORMATS = ("JPEG", "MPO")
_LEAST = 16  # pixels; below, sizes do not tell fractions apart


def draft(image: Image.Image, resized_size: tuple[int, int], divides: bool = False) -> int:
    """Let `image`, which is open and not loaded, decode at the smallest fraction that is not below `resized_size`.

    Args:
        divides: no fraction that would leave a part of a pixel at the right or at the bottom.

    Returns:
        1, 2, 4 or 8, by which the sides were divided and rounded up; 1 for all that is no JPEG.
    """
    width, height = image.size
    most = min(width // resized_size[0], height // resized_size[1])
    if image.format not in _FORMATS or most < 2 or min(width, height) < _LEAST:
        return 1
    scale = 8 if most >= 8 else 4 if most >= 4 else 2
    while divides and (width % scale or height % scale):
        scale //= 2
    if scale == 1:
        return 1
    image.draft(None, (width // scale, height // scale))
    return 1 if image.size == (width, height) else scale


def decoded_by_simplejpeg(image: Image.Image, alpha: bool, scale: int = 1) -> Pixels | None:
    """[H, W, 3], or with `alpha` [H, W, 4], of an open JPEG, `draft` included; None where Pillow must decode it."""
    module = _simplejpeg()
    if module is None or image.format not in _FORMATS or image.mode != "RGB" or image.fp is None:
        return None
    image.fp.seek(0)
    return _decode(module, image.fp.read(), image.size, "RGBA" if alpha else "RGB", scale)


def _decode(module: Any, data: bytes, size: tuple[int, int], channels: str, scale: int) -> Pixels | None:
    least = {} if scale == 1 else {"min_width": size[0], "min_height": size[1]}
    try:
        pixels: Pixels = module.decode_jpeg(data, channels, **least)
    except (ValueError, RuntimeError):
        return None
    return pixels if pixels.shape == (size[1], size[0], len(channels)) else None


@lru_cache(maxsize=1)
def _simplejpeg() -> Any:
    """The module; None where it is missing, or decodes otherwise than Pillow."""
    try:
        module = importlib.import_module("simplejpeg")
    except ImportError:
        return None
    return module if _is_pillows(module) else None


def _is_pillows(module: Any) -> bool:
    noise = np.random.default_rng(0).integers(0, 256, (67, 45, 3), dtype=np.uint8)
    smooth = Image.fromarray(noise).resize((180, 268), Image.Resampling.BICUBIC)
    for subsampling in (0, 2):
        file = io.BytesIO()
        smooth.save(file, "JPEG", quality=85, subsampling=subsampling)
        for resized in ((180, 268), (90, 134), (45, 67)):
            with Image.open(file) as image:
                scale = draft(image, resized)
                by_pillow = np.asarray(image)
            found = _decode(module, file.getvalue(), (by_pillow.shape[1], by_pillow.shape[0]), "RGB", scale)
            if found is None or not np.array_equal(found, by_pillow):
                return False
    return True
