"""From pixels (width first in sizes, [H, W, C] in memory) to what models read: [3, H, W] float in [-1, 1]."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["to_unit_tensor"]


def to_unit_tensor(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    """[H, W, 3] uint8 -> [3, H, W] float32 in [-1, 1], by the operations that sd-scripts uses, in their order."""
    tensor = torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).to(torch.float32)
    return tensor.div_(255).sub_(0.5).div_(0.5)
