"""Pixels of an image as sd-scripts trains them: loaded unrotated, resized, centre-cropped to the bucket.

Source: `load_image`, `trim_and_resize_if_required` and `resize_image` of kohya-ss/sd-scripts. The result is
byte-identical where OpenCV is installed, which "area" and so the defaults need. Without it "bilinear" and "bicubic"
differ visibly, because Pillow's versions smooth when they shrink, and "nearest" sometimes takes a neighbour. Since
0.12.0 sd-scripts replaces a missing `cv2` by its own module, with which "area" and "bilinear" agree with OpenCV's to 1
of 255; it is not used here.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import OPENCV

Pixels = npt.NDArray[np.uint8]

INTERPOLATIONS = ("auto", "area", "lanczos", "bilinear", "bicubic", "nearest", "box")
IMITATED = "-stub"  # marks a library that is imitated to 1 of 255
_ROWS = 32  # of floats at a time: so few stay in the processor's cache
_FILTERS = {  # OpenCV's, where sd-scripts uses it, and Pillow's
    "area": ("INTER_AREA", None),
    "bilinear": ("INTER_LINEAR", Image.Resampling.BILINEAR),
    "bicubic": ("INTER_CUBIC", Image.Resampling.BICUBIC),
    "nearest": ("INTER_NEAREST_EXACT", Image.Resampling.NEAREST),
    "lanczos": ("", Image.Resampling.LANCZOS),
    "box": ("", Image.Resampling.BOX),
}
_SAME = {"linear": "bilinear", "cubic": "bicubic", "lanczos4": "lanczos"}


def choose_interpolation(size: tuple[int, int], resized_size: tuple[int, int], interpolation: str | None) -> str:
    """The filter for a resize from `size` to `resized_size` (width, height).

    "auto" (or None), sd-scripts' default, is area where neither side grows, else Lanczos.

    Raises:
        KohyaBucketError: an interpolation that does not exist.
    """
    name = _SAME.get(interpolation or "auto", interpolation or "auto")
    if name not in INTERPOLATIONS:
        raise KohyaBucketError(
            f"interpolation {interpolation!r} does not exist: use one of {', '.join(INTERPOLATIONS)}"
        )
    if name == "auto":
        return "area" if size[0] >= resized_size[0] and size[1] >= resized_size[1] else "lanczos"
    return name


def require_filter(interpolation: str | None) -> None:
    """Raise `KohyaBucketError` for an interpolation that does not exist, or that needs OpenCV if it is missing."""
    if choose_interpolation((2, 2), (1, 1), interpolation) == "area" and _cv2() is None:
        raise KohyaBucketError(
            f"interpolation {interpolation or 'auto'!r} shrinks by the area filter of OpenCV, which is not installed: "
            f"{OPENCV}, or choose another, such as 'lanczos'"
        )


def resize_and_crop(
    pixels: Pixels,
    resized_size: tuple[int, int],
    bucket_size: tuple[int, int],
    interpolation: str | None = None,
    crop: tuple[int, int] | None = None,
) -> Pixels:
    """Scale `pixels` [H, W, C] to `resized_size`, then cut `bucket_size` out; all sizes are (width, height).

    Args:
        interpolation: one of `INTERPOLATIONS`; None is "auto".
        crop: left and top of the cut in the resized image; None takes the centre, and an odd excess loses its extra
            pixel on the right or at the bottom.

    Returns:
        [bucket height, bucket width, C] uint8, contiguous.

    Raises:
        KohyaBucketError: the resized image does not cover the bucket, the cut lies outside, or see `require_filter`.
    """
    (width, height), (resized_width, resized_height) = bucket_size, resized_size
    if resized_width < width or resized_height < height:
        raise KohyaBucketError(
            f"resized size {resized_width}x{resized_height} does not cover the bucket {width}x{height}: "
            "the placement and the image do not belong together"
        )
    size = (int(pixels.shape[1]), int(pixels.shape[0]))
    if size != (resized_width, resized_height):
        name = choose_interpolation(size, resized_size, interpolation)
        pixels = _resize(pixels, (int(resized_width), int(resized_height)), name)
    left, top = crop or ((resized_width - width) // 2, (resized_height - height) // 2)
    if not (0 <= left <= resized_width - width and 0 <= top <= resized_height - height):
        raise KohyaBucketError(f"crop at {left},{top} of {width}x{height} leaves {resized_width}x{resized_height}")
    return np.ascontiguousarray(pixels[top : top + height, left : left + width])


def resampler(name: str, *, by_trainer: bool = False) -> str:
    """The library that computes filter `name` here, "cv2" or "pillow". Part of a latent's fingerprint.

    Args:
        by_trainer: sd-scripts itself resizes in this process, if OpenCV is missing with its own imitation.
    """
    if name in ("lanczos", "box"):
        return "pillow"
    if by_trainer and name in ("area", "bilinear") and _is_stub(sys.modules.get("cv2")):
        return f"cv2{IMITATED}"
    return "cv2" if name == "area" or _cv2() is not None else "pillow"


def _resize(pixels: Pixels, size: tuple[int, int], name: str) -> Pixels:
    cv2, (flag, by_pillow) = _cv2(), _FILTERS[name]
    if cv2 is not None and flag:
        out: Pixels = cv2.resize(pixels, size, interpolation=getattr(cv2, flag))
        return out.reshape(size[1], size[0], -1)  # of one channel, OpenCV drops the axis
    if name == "area":
        require_filter(name)
    if pixels.shape[2] == 3 or not flag:
        return np.array(Image.fromarray(pixels).resize(size, by_pillow))
    # Each channel by itself, as in OpenCV: Pillow would weight colours by alpha.
    channels = [Image.fromarray(pixels[:, :, c]).resize(size, by_pillow) for c in range(pixels.shape[2])]
    return np.stack(channels, axis=2)


@lru_cache(maxsize=1)
def _cv2() -> Any:
    """OpenCV, or None: it is optional."""
    with suppress(ImportError):
        cv2 = importlib.import_module("cv2")
        return None if _is_stub(cv2) else cv2
    return None


def _is_stub(cv2: Any) -> bool:
    """Whether this is the module that sd-scripts registers as `cv2` if OpenCV is missing."""
    return bool(getattr(cv2, "_IS_CV2_STUB", False))


def to_floats(pixels: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Write [H, W, 3 or more] uint8 into `out` [3, H, W] float32 in -1..1, bit-identical to sd-scripts."""
    for top in range(0, len(pixels), _ROWS):
        part = out[:, top : top + _ROWS]
        part[:] = pixels[top : top + _ROWS, :, :3].transpose(2, 0, 1)
        part /= np.float32(255)
        part -= np.float32(0.5)
        part *= np.float32(2)  # equal to dividing by a half, and faster
