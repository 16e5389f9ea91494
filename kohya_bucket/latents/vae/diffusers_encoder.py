"""The encoder over diffusers' autoencoders that have a distribution: AutoencoderKL and its like."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import pip_install
from kohya_bucket.latents.architectures import ARCHITECTURES
from kohya_bucket.latents.fingerprint import module_hash
from kohya_bucket.latents.latent_space import dtype_name

if TYPE_CHECKING:
    import torch

__all__ = ["DiffusersEncoder"]


class DiffusersEncoder:
    """`VAEEncoder` over a diffusers `AutoencoderKL` or `AutoencoderKLHunyuanImage`.

    Args:
        vae: the model, in the type its weights are to be hashed in.
        device: where it runs.
        dtype: type it computes in.
        tiling, slicing: encode in tiles, or image by image, to save memory.
        xformers: memory-efficient attention, where xformers is installed.
        compile: let `torch.compile` translate the encoder.
        architecture: sd-scripts' name of the model family, where known.
    """

    def __init__(
        self,
        vae: Any,
        *,
        device: str | torch.device = "cpu",
        dtype: Any = "float32",
        tiling: bool = False,
        slicing: bool = False,
        xformers: bool = False,
        compile: bool = False,
        architecture: str = "",
    ) -> None:
        import torch

        self.fingerprint = module_hash(vae)
        self.architecture = architecture
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype_name(dtype))
        if tiling:
            vae.enable_tiling()
        if slicing:
            vae.enable_slicing()
        if xformers:
            _use_xformers(vae)
        self.vae = vae.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)
        if compile:
            self.vae.encoder = torch.compile(self.vae.encoder)

    @property
    def downsample_factor(self) -> int:
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.latent_channels)

    @property
    def scale_factor(self) -> float:
        family = ARCHITECTURES.get(self.architecture)
        return float(self.vae.config.scaling_factor or (1.0 if family is None else family.scale_factor))

    @property
    def shift_factor(self) -> float:
        return float(getattr(self.vae.config, "shift_factor", None) or 0.0)

    def posterior(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation, unscaled, [B, C, h, w] each, on the encoder's device."""
        import torch

        with torch.inference_mode():
            found = self.vae.encode(pixels.to(device=self.device, dtype=self.dtype)).latent_dist
            return found.mean, found.std

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """The posterior's mean, scaled for training."""
        mean, _ = self.posterior(pixels)
        return (mean - self.shift_factor) * self.scale_factor

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 for a while: for images whose activations overflow in float16."""
        import torch

        before = self.dtype
        self.dtype = torch.float32
        self.vae.to(dtype=torch.float32)
        try:
            yield
        finally:
            self.dtype = before
            self.vae.to(dtype=before)


def _use_xformers(vae: Any) -> None:
    try:
        importlib.import_module("xformers")
    except ImportError as error:
        raise KohyaBucketError(f"xformers is not installed ({error}): {pip_install('xformers')}") from error
    vae.enable_xformers_memory_efficient_attention()
