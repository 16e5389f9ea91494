"""Encoders over diffusers' autoencoders without a distribution to sample from: the tiny ones, and Qwen-Image's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kohya_bucket.latents.vae.diffusers_encoder import DiffusersEncoder

if TYPE_CHECKING:
    import torch

__all__ = ["QwenImageEncoder", "TinyEncoder"]


class TinyEncoder(DiffusersEncoder):
    """`VAEEncoder` over a diffusers `AutoencoderTiny`: no distribution, and its latents come out scaled.

    Args: as `DiffusersEncoder`; `scale_factor` and `shift_factor` are those of the VAE it stands in for.
    """

    def __init__(self, vae: Any, *, scale_factor: float = 1.0, shift_factor: float = 0.0, **options: Any) -> None:
        super().__init__(vae, **options)
        self._scale, self._shift = scale_factor, shift_factor

    posterior = None  # type: ignore[assignment]

    @property
    def downsample_factor(self) -> int:
        return int(2 ** (len(self.vae.config.encoder_block_out_channels) - 1))

    @property
    def scale_factor(self) -> float:
        return self._scale

    @property
    def shift_factor(self) -> float:
        return self._shift

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            out: torch.Tensor = self.vae.encode(pixels.to(device=self.device, dtype=self.dtype)).latents
            return out


class QwenImageEncoder(DiffusersEncoder):
    """`VAEEncoder` over a diffusers `AutoencoderKLQwenImage`, as sd-scripts uses it for Anima.

    The most probable latent, each channel less its mean and divided by its deviation, which the model's config
    states. There is no one scale, and sd-scripts draws no sample here, so there is no `posterior` either.
    """

    posterior = None  # type: ignore[assignment]
    scale_factor, shift_factor = 1.0, 0.0

    @property
    def downsample_factor(self) -> int:
        return int(2 ** len(self.vae.config.temperal_downsample))

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.z_dim)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        import torch

        def per_channel(values: list[float]) -> torch.Tensor:
            return torch.tensor(values).view(1, -1, 1, 1, 1).to(device=self.device, dtype=self.dtype)

        with torch.inference_mode():
            frames = pixels.to(device=self.device, dtype=self.dtype)[:, :, None]
            mode: torch.Tensor = self.vae.encode(frames).latent_dist.mode()
            config = self.vae.config
            # the inverse first, in the model's type: the operations of sd-scripts, so that low precision agrees
            return ((mode - per_channel(config.latents_mean)) * (1.0 / per_channel(config.latents_std)))[:, :, 0]
