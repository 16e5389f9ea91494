"""One cell of an image column, whatever it holds: its size without decoding, and its pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.headers import header_of, read_header
from kohya_bucket.images.pixels import NO_IMAGE, Fit, Picture, load_picture, to_pixels

__all__ = ["cell_picture", "cell_pixels", "cell_size", "explained"]

_CHANNELS = (1, 3, 4)


def cell_size(cell: Any, obey_exif: bool) -> tuple[int, int]:
    """(width, height) of what `cell_pixels` returns; nothing is decoded.

    Raises:
        UnreadableImageError: empty, broken, or of a shape that is no image.
    """
    if isinstance(cell, Image.Image):
        return int(cell.width), int(cell.height)
    encoded = _encoded(cell)
    if encoded is not None:
        header = header_of(encoded) if isinstance(encoded, bytes) else read_header(encoded)
        width, height, orientation, _ = header
        return (height, width) if obey_exif and orientation >= 5 else (width, height)
    height, width, _ = _as_height_width(_array(cell)).shape
    return width, height


def cell_pixels(cell: Any, obey_exif: bool) -> npt.NDArray[np.uint8]:
    """The cell as [H, W, 3] uint8, see `cell_picture`."""
    return cell_picture(cell, obey_exif).pixels


def cell_picture(cell: Any, obey_exif: bool, fit: Fit | None = None) -> Picture:
    """The cell; encoded images are turned upright if `obey_exif`, and JPEG decoded at a fraction as `fit` allows.

    Raises:
        UnreadableImageError: empty, broken, of a shape that is no image, or floats outside [0, 1].
    """
    encoded = None if isinstance(cell, Image.Image) else _encoded(cell)
    if encoded is None:
        image = isinstance(cell, Image.Image)
        return Picture.whole(to_pixels(cell) if image else _as_rgb(_as_height_width(_array(cell))))
    try:
        return load_picture(encoded, obey_exif=obey_exif, fit=fit)
    except NO_IMAGE as error:
        raise UnreadableImageError(str(error)) from error


def _encoded(cell: Any) -> bytes | str | None:
    """A cell's encoded file, or the path of it; None for arrays. A cell may also be the reason why it has no image."""
    if isinstance(cell, UnreadableImageError):
        raise cell
    if isinstance(cell, (bytes, str)):
        return cell
    if isinstance(cell, (bytearray, memoryview)):
        return bytes(cell)
    if isinstance(cell, dict):
        if cell.get("bytes"):
            return bytes(cell["bytes"])
        if cell.get("path"):
            return str(cell["path"])
        raise UnreadableImageError("neither bytes nor a path in this cell")
    if cell is None:
        raise UnreadableImageError("an empty cell")
    return None


def _array(cell: Any) -> npt.NDArray[Any]:
    if hasattr(cell, "detach"):
        cell = cell.detach().cpu().numpy()
    array = np.asarray(cell)
    if array.dtype.kind not in "uif" and array.dtype.kind != "b":
        raise UnreadableImageError(f"a {type(cell).__name__} of dtype {array.dtype} is not an image")
    return array


def _as_height_width(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """[H, W, C] from [H, W], [H, W, C] or [C, H, W]; the small axis is taken for the channels."""
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3:
        raise UnreadableImageError(
            f"an array of shape {list(array.shape)} is not an image: it must be [H, W], [H, W, C] or [C, H, W]"
        )
    if array.shape[2] not in _CHANNELS and array.shape[0] in _CHANNELS:
        array = array.transpose(1, 2, 0)
    if array.shape[2] not in _CHANNELS or 0 in array.shape:
        raise UnreadableImageError(f"shape {list(array.shape)} has no axis of 1, 3 or 4 channels")
    return array


def _as_rgb(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    if array.dtype.kind == "b":
        array = array.astype(np.uint8) * 255
    elif array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):
            # [-1, 1] and [0, 255] look alike often enough that guessing would spoil some images silently.
            raise UnreadableImageError(f"float pixels must lie in [0, 1], found {low:g} to {high:g}")
        array = np.rint(array * 255).astype(np.uint8)
    elif array.dtype != np.uint8:
        if array.dtype == np.uint16:
            array = (array // 257).astype(np.uint8)
        elif array.min() < 0 or array.max() > 255:
            raise UnreadableImageError(f"pixels of dtype {array.dtype} must lie in 0 to 255")
        else:
            array = array.astype(np.uint8)
    if array.shape[2] == 1:
        return np.repeat(array, 3, axis=2)
    return np.ascontiguousarray(array[..., :3])


def explained(name: str, error: Exception) -> KohyaBucketError:
    """The error for a person: which image, and why."""
    return KohyaBucketError(f"{name}: cannot be read as an image ({error}); repair or remove it")
