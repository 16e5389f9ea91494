"""What the numbers of latents mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

__all__ = ["LatentSpace"]


@dataclass(frozen=True)
class LatentSpace:
    """What the numbers of a shard mean.

    Attributes:
        scale_factor, shift_factor: training takes `(raw - shift_factor) * scale_factor`.
        values: "raw", as the VAE gives them, or "scaled", with that already applied; "text", outputs of text encoders.
        downsample_factor: pixels per latent in each side.
        architecture: sd-scripts' name of the model family, where known ("sdxl", "flux", ...).
    """

    scale_factor: float = 1.0
    shift_factor: float = 0.0
    values: str = "raw"
    downsample_factor: int = 8
    architecture: str = ""

    @classmethod
    def of(cls, stated: Any) -> LatentSpace:
        """The same of what a file states. Raises `ValueError` or `TypeError` if numbers cannot mean that."""
        space = cls(**stated)
        numbers = (space.scale_factor, space.shift_factor, space.downsample_factor)
        if not all(type(n) in (int, float) and math.isfinite(n) for n in numbers):
            raise ValueError(f"latents cannot be scaled by {numbers}")
        if space.scale_factor == 0 or type(space.downsample_factor) is not int or space.downsample_factor < 1:
            raise ValueError(f"latents cannot be scaled by {numbers}")
        if space.values not in ("raw", "scaled", "text") or not isinstance(space.architecture, str):
            raise ValueError(f"latents cannot be {space.values!r} of {space.architecture!r}")
        return space
