"""From pixels (width first in sizes, [H, W, C] in memory) to what models read: [3, H, W] float in [-1, 1] or [0, 1]."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.resize import to_floats

__all__ = ["PixelRange", "check_pixel_range", "shrink_fast", "to_unit_tensor"]

PixelRange = tuple[float, float]


def check_pixel_range(pixel_range: Any) -> PixelRange:
    """(-1, 1), which VAEs of diffusion models take, or (0, 1), which torchvision's transforms start from.

    Raises:
        KohyaBucketError: any other.
    """
    try:
        low, high = pixel_range
        if (low, high) in ((-1, 1), (0, 1)):
            return int(low), int(high)
    except (TypeError, ValueError):
        pass
    raise KohyaBucketError(f"pixel_range is {pixel_range!r}, but must be (-1, 1) or (0, 1); transform= makes any other")


def to_unit_tensor(pixels: npt.NDArray[np.uint8], pixel_range: PixelRange = (-1, 1)) -> torch.Tensor:
    """[H, W, 3] uint8 -> [3, H, W] float32; in [-1, 1] as sd-scripts computes it."""
    if pixel_range[0] == 0:
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).to(torch.float32).div_(255)
    tensor = torch.empty((3, *pixels.shape[:2]), dtype=torch.float32)
    to_floats(pixels, tensor.numpy())
    return tensor


def shrink_fast(pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """[H, W, C] -> [height, width, C] of `size` (width, height), which is not larger in either side.

    Torch's bilinear filter, widened so that every pixel counts: a third to two thirds of the area filter's time, and as
    close to it as Pillow's bicubic filter is (`benchmarks/pixels.py`). The channels lie one after the other in memory.
    """
    image = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)[None]
    smaller = torch.nn.functional.interpolate(image, (size[1], size[0]), mode="bilinear", antialias=True)
    found: npt.NDArray[np.uint8] = smaller[0].permute(1, 2, 0).numpy()
    return found
