"""Pixels of an image file as sd-scripts loads them: unrotated by default.

Source: `load_image` of kohya-ss/sd-scripts.

JPEG are decoded by simplejpeg if it is installed: its libjpeg-turbo takes half of Pillow's time for the same bits
(`benchmarks/pixels.py`). Since Pillow may be built with another libjpeg, both decode a small test picture before
simplejpeg is trusted. Files that it refuses (it is stricter with damage) are left to Pillow.
"""

from __future__ import annotations

import importlib
import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.by_pillow import TURNS, load_plugin, orientation_in
from kohya_bucket.images.formats import UnreadableImageError, not_decoded, sniff, what_to_do
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.remote import fetched
from kohya_bucket.images.scan import Job, ScanTask
from kohya_bucket.inputs import open_input

Pixels = npt.NDArray[np.uint8]
_FORMATS = ("JPEG", "MPO")
NO_IMAGE = (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError)
"""Raised by Pillow for damaged files: `RuntimeError` for AVIF."""


def load_pixels(source: str | PathLike[str] | bytes, *, alpha: bool = False, obey_exif: bool = False) -> Pixels:
    """Load a file, or its bytes, as [H, W, 3] RGB or, with `alpha`, [H, W, 4] RGBA, uint8.

    The array may be read-only. As in sd-scripts [H, W] is the size in the header, unless `obey_exif` turns the image.

    Raises:
        NO_IMAGE: the file is missing, broken or not an image.
    """
    with _opened(source) as image:
        return _pixels(image, alpha, obey_exif)


def explained(name: str | PathLike[str], error: Exception) -> KohyaBucketError:
    """The error for the user: which image, why, and what to do."""
    return KohyaBucketError(f"{name}: {not_decoded(error)}; {what_to_do(str(error))}")


@contextmanager
def _opened(source: str | PathLike[str] | bytes) -> Iterator[Image.Image]:
    with io.BytesIO(source) if isinstance(source, bytes) else open_input(source) as file:
        try:
            image = Image.open(file)
        except UnidentifiedImageError:
            file.seek(0)
            load_plugin(sniff(file.read(64)))
            file.seek(0)
            image = Image.open(file)
        try:
            yield image
        except MemoryError:
            raise OSError(f"no memory for its {image.width:,}x{image.height:,} pixels") from None


def _pixels(image: Image.Image, alpha: bool, obey_exif: bool) -> Pixels:
    is_jpeg = image.format in _FORMATS and image.mode == "RGB"
    turns = is_jpeg and obey_exif and orientation_in(image) != 1
    if is_jpeg and not turns and image.fp is not None and (module := _simplejpeg()) is not None:
        image.fp.seek(0)
        pixels = _decode(module, image.fp.read(), image.size, "RGBA" if alpha else "RGB")
        if pixels is not None:
            return pixels
    return to_pixels(upright(image) if obey_exif else image, alpha)


def upright(image: Image.Image) -> Image.Image:
    """An image turned by EXIF or XMP, as `PIL.ImageOps.exif_transpose` does."""
    image.load()  # this turns TIFF, and a PNG's EXIF may lie behind its pixels
    turn = TURNS.get(orientation_in(image))
    return image if turn is None else image.transpose(turn)


def to_pixels(image: Image.Image, alpha: bool = False) -> Pixels:
    """A Pillow image as [H, W, 3] RGB or [H, W, 4] RGBA uint8; the array may be read-only."""
    mode = "RGBA" if alpha else "RGB"
    return np.asarray(image if image.mode == mode else image.convert(mode), dtype=np.uint8)


def _decode(module: Any, data: bytes, size: tuple[int, int], channels: str) -> Pixels | None:
    try:
        pixels: Pixels = module.decode_jpeg(data, channels)
    except (ValueError, RuntimeError):
        return None
    return pixels if pixels.shape == (size[1], size[0], len(channels)) else None


@cache
def _simplejpeg() -> Any:
    """The module; None if it is missing, or decodes differently from Pillow."""
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
        with Image.open(file) as image:
            by_pillow = np.asarray(image)
        pixels = _decode(module, file.getvalue(), smooth.size, "RGB")
        if pixels is None or not np.array_equal(pixels, by_pillow):
            return False
    return True


_HIDDEN = 0.01  # share of pixels; a soft edge has fewer


def decode(path: str) -> tuple[bool, bool]:
    """Decode the whole image, as training does.

    Returns:
        whether its grey has 16 bits, and whether part of it is transparent.

    Raises:
        UnreadableImageError: it cannot be decoded. KohyaBucketError: a URL that cannot be read.
    """
    try:
        with _opened(fetched(path)) as image:
            has_alpha = "A" in image.getbands() or "transparency" in image.info
            pixels = _pixels(image, has_alpha, False)
            hidden = has_alpha and float((pixels[..., 3] < 128).mean()) > _HIDDEN
            return image.mode.startswith("I"), hidden
    except KohyaBucketError:
        raise
    except NO_IMAGE as error:
        raise UnreadableImageError(not_decoded(error)) from None


class DecodedImages(NamedTuple):
    """Images that training cannot load, or loads as something else, in their order.

    Attributes:
        broken: {path: reason} of images that cannot be decoded.
        deep: images with 16-bit grey, which trainers clip at 255, so that nearly all is white.
        transparent: images with colours under transparency, which trainers show.
    """

    broken: dict[str, str]
    deep: list[str]
    transparent: list[str]


def decode_all(paths: Sequence[str], progress: Progress | None = None) -> DecodedImages:
    """Decode images, on one thread per processor; only a few at a time are in memory."""
    task = ScanTask(decode, [("deep", "?"), ("hidden", "?")])
    job = Job(task, paths, engine="threads", workers=os.cpu_count(), progress=progress).run()
    deep, hidden = ([paths[i] for i in np.flatnonzero(job.rows[name]).tolist()] for name in ("deep", "hidden"))
    return DecodedImages({paths[i]: reason for i, reason in sorted(job.failures.items())}, deep, hidden)
