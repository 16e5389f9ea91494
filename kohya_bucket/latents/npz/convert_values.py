"""Latents as a model family's npz hold them, raw or scaled for training; and masks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.architectures import Architecture
from kohya_bucket.latents.latent_space import LatentSpace

__all__ = ["convert_values", "mask_values"]


def convert_values(latents: npt.NDArray[np.float32], space: LatentSpace, arch: Architecture) -> npt.NDArray[np.float32]:
    """Turn latents [C, h, w], or many, of `space` into what sd-scripts caches for `arch`.

    Raises:
        LatentStoreError: raw latents of a family (Anima) whose autoencoder scales each channel on its own.
    """
    if space.values != arch.values:
        if arch.per_channel:
            raise LatentStoreError(
                f"{arch.name} caches latents as its own autoencoder normalizes each channel, and these are raw: "
                "encode with that autoencoder (AutoencoderKLQwenImage)"
            )
        if arch.values == "scaled":
            latents = np.float32(arch.scale_factor) * (latents - np.float32(arch.shift_factor))
        else:
            latents = latents / np.float32(space.scale_factor) + np.float32(space.shift_factor)
    return latents


def mask_values(mask: npt.NDArray[np.uint8] | None, bucket_size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """The alpha channel of a bucket (width, height) as npz hold it: [H, W] in 0..1. None is an opaque image's."""
    if mask is None:
        return np.ones(bucket_size[::-1], np.float32)
    values: npt.NDArray[np.float32] = mask.astype(np.float32) / np.float32(255)
    return values
