"""What encodes pixels: the protocol that any VAE can satisfy, and what this package asks of it."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.architectures import LatentSpace
from kohya_bucket.latents.fingerprint import module_hash

if TYPE_CHECKING:
    import torch

__all__ = ["PosteriorEncoder", "VAEEncoder", "check_encoder", "encoder_hash", "encoder_space"]

_MEMBERS = ("downsample_factor", "latent_channels", "scale_factor", "encode")


@runtime_checkable
class VAEEncoder(Protocol):
    """Encodes pixels into latents. Four members, and any model fits.

    Attributes:
        downsample_factor: pixels per latent in each side, e.g. 8.
        latent_channels: channels of a latent, e.g. 4.
        scale_factor: what `encode` has multiplied its result with, so that latents have unit variance.
    """

    @property
    def downsample_factor(self) -> int: ...

    @property
    def latent_channels(self) -> int: ...

    @property
    def scale_factor(self) -> float: ...

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """[B, 3, H, W] pixels in -1..1 to [B, C, H/f, W/f] latents, already scaled."""


@runtime_checkable
class PosteriorEncoder(VAEEncoder, Protocol):
    """An encoder that also gives the distribution it would sample from, unscaled.

    Attributes:
        shift_factor: training takes `(raw - shift_factor) * scale_factor`.
    """

    @property
    def shift_factor(self) -> float: ...

    def posterior(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, 3, H, W] pixels in -1..1 to mean and standard deviation, [B, C, H/f, W/f] each."""


def check_encoder(encoder: object) -> None:
    """Refuse what cannot encode, e.g. a bare diffusers VAE, before images are looked at.

    Raises:
        KohyaBucketError: a member of `VAEEncoder` is missing.
    """
    missing = [name for name in _MEMBERS if not hasattr(encoder, name)]
    if missing:
        raise KohyaBucketError(
            f"encoder is a {type(encoder).__name__} without {', '.join(missing)}: an encoder has "
            f"{', '.join(_MEMBERS)} (see VAEEncoder)"
        )


def encoder_hash(encoder: Any) -> str:
    """Hash of what an encoder computes: its `fingerprint`, else its weights, else the name of its class.

    Weights are looked for in the encoder itself and in its attributes `vae`, `model` and `_vae`.
    """
    given = getattr(encoder, "fingerprint", None)
    if isinstance(given, str) and given:
        return given
    for module in (encoder, *(getattr(encoder, name, None) for name in ("vae", "model", "_vae"))):
        if hasattr(module, "state_dict"):
            return module_hash(module)
    kind = type(encoder)
    text = f"{kind.__module__}.{kind.__qualname__} {encoder.scale_factor}"
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def encoder_space(encoder: Any) -> LatentSpace:
    """What the numbers mean that are stored for `encoder`: raw where it gives a posterior, else scaled."""
    raw = isinstance(encoder, PosteriorEncoder)
    return LatentSpace(
        float(encoder.scale_factor),
        float(getattr(encoder, "shift_factor", 0.0) or 0.0),
        "raw" if raw else "scaled",
        int(encoder.downsample_factor),
        str(getattr(encoder, "architecture", "") or ""),
    )
