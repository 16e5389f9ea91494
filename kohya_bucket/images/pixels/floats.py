"""From bytes to what models read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["to_floats"]

_ROWS = 32  # at a time: so few stay in a processor's own cache


def to_floats(pixels: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Put [H, W, 3 or more] uint8 into `out` [3, H, W] float32 in -1..1: sd-scripts' operations, and its bits."""
    for top in range(0, len(pixels), _ROWS):
        part = out[:, top : top + _ROWS]
        part[:] = pixels[top : top + _ROWS, :, :3].transpose(2, 0, 1)
        part /= np.float32(255)
        part -= np.float32(0.5)
        part *= np.float32(2)  # to divide by a half is the same, and slower
