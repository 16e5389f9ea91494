"""What the numbers of latents mean."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LatentSpace"]


@dataclass(frozen=True)
class LatentSpace:
    """What the numbers of a shard mean.

    Attributes:
        scale_factor, shift_factor: training takes `(raw - shift_factor) * scale_factor`.
        values: "raw", as the VAE gives them, or "scaled", with that already applied.
        downsample_factor: pixels per latent in each side.
        architecture: sd-scripts' name of the model family, where known ("sdxl", "flux", ...).
    """

    scale_factor: float = 1.0
    shift_factor: float = 0.0
    values: str = "raw"
    downsample_factor: int = 8
    architecture: str = ""
