"""What the numbers of a latent mean: which file they came from does not tell."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LatentSpace:
    """What the numbers of a shard mean.

    Attributes:
        scale_factor, shift_factor: training takes `(raw - shift_factor) * scale_factor`.
        values: "raw", as the VAE gives them, or "scaled", with that already applied; "text", outputs of text encoders.
        downsample_factor: pixels per latent in each side.
        architecture: the model family, as `MODEL_FAMILIES` names it, where known ("sdxl", "flux", ...).
    """

    scale_factor: float = 1.0
    shift_factor: float = 0.0
    values: str = "raw"
    downsample_factor: int = 8
    architecture: str = ""

    @classmethod
    def from_json(cls, stated: Any) -> LatentSpace:
        """From what a file states. Raises `ValueError` or `TypeError` where no numbers can mean that."""
        space = cls(**stated)
        numbers = (space.scale_factor, space.shift_factor, space.downsample_factor)
        usable = all(type(n) in (int, float) and math.isfinite(n) for n in numbers) and space.scale_factor != 0
        if not usable or type(space.downsample_factor) is not int or space.downsample_factor < 1:
            raise ValueError(f"latents cannot be scaled by {numbers}")
        if space.values not in ("raw", "scaled", "text") or not isinstance(space.architecture, str):
            raise ValueError(f"latents cannot be {space.values!r} of {space.architecture!r}")
        return space
