"""From pixels (width first in sizes, [H, W, C] in memory) to what models read: [3, H, W] float in [-1, 1]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kohya_bucket.images.pixels.floats import to_floats

__all__ = ["to_unit_tensor"]


def to_unit_tensor(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    """[H, W, 3] uint8 -> [3, H, W] float32 in [-1, 1], as sd-scripts computes it."""
    tensor = torch.empty((3, *pixels.shape[:2]), dtype=torch.float32)
    to_floats(pixels, tensor.numpy())
    return tensor
