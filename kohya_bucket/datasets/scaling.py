"""Latents as training takes them, or as the VAE gave them, from what a shard holds."""

from __future__ import annotations

import torch

from kohya_bucket.latents.latent_space import LatentSpace

__all__ = ["is_as_wanted", "scale"]


def is_as_wanted(space: LatentSpace, scaled: bool) -> bool:
    return space.values == ("scaled" if scaled else "raw") or (space.scale_factor == 1 and space.shift_factor == 0)


def scale(latents: torch.Tensor, space: LatentSpace, scaled: bool) -> torch.Tensor:
    """From what the shard holds to what is asked for; `latents` of a posterior are raw."""
    if is_as_wanted(space, scaled):
        return latents
    if scaled:
        return (latents - space.shift_factor) * space.scale_factor
    return latents / space.scale_factor + space.shift_factor
