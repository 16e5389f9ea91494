"""What encodes pixels: the protocol that any VAE can satisfy, what this package asks of it, and a batch through it.

A batch is halved when memory runs out, and encoded in float32 where it overflowed.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.fingerprint import module_hash
from kohya_bucket.latents.space import LatentSpace

if TYPE_CHECKING:
    import torch


_MEMBERS = ("downsample_factor", "latent_channels", "scale_factor", "encode")


@runtime_checkable
class VAEEncoder(Protocol):
    """Encodes pixels into latents. Four members, and any model fits.

    Attributes:
        downsample_factor: pixels per latent in each side, e.g. 8.
        latent_channels: channels of a latent, e.g. 4.
        scale_factor: what `encode` has multiplied its result with, so that latents have unit variance.

    Examples:
        >>> import torch
        >>> class Shrunk:
        ...     downsample_factor, latent_channels, scale_factor = 8, 3, 1.0
        ...     def encode(self, pixels):
        ...         return torch.nn.functional.avg_pool2d(pixels, 8)
        >>> isinstance(Shrunk(), VAEEncoder)
        True
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
    """Raises `KohyaBucketError`, before images are looked at, for what lacks a member of `VAEEncoder`, e.g. a bare
    diffusers VAE."""
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


@dataclass
class Encoded:
    """Latents of a batch, float32 on the CPU; `bad[k]` says what is wrong with item k, or None."""

    plain: torch.Tensor
    flipped: torch.Tensor | None
    bad: list[str | None]


def normalize(pixels: torch.Tensor) -> torch.Tensor:
    """[B, H, W, 3] uint8 to [B, 3, H, W] float32 in -1..1, as torchvision's `ToTensor` and `Normalize`."""
    return pixels.permute(0, 3, 1, 2).float().div(255).sub(0.5).div(0.5).contiguous()


def noise_seed(seed: int, source: str, collection: str = "") -> int:
    """Seed of one item's noise: the same whatever batch, rank or run encodes it."""
    text = f"{seed}/{collection}/{source}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class BatchEncoder:
    """Runs batches through an encoder, one at a time however many threads call it.

    Args:
        encoder: any `VAEEncoder`; with `posterior` it is sampled here, with noise that belongs to the item.
        say: called with a line of text for whatever a user should know.

    Attributes:
        busy: seconds for which a batch was in the encoder.
    """

    def __init__(self, encoder: VAEEncoder, kind: str, flip: bool, say: Callable[[str], None]) -> None:
        self._encoder = encoder
        self._kind = kind
        self._flip = flip
        self._say = say
        self._largest: dict[tuple[int, ...], int] = {}
        self._turn = threading.Lock()
        self.busy = 0.0

    @property
    def on_processor(self) -> bool:
        """The encoder takes its pixels where they are decoded."""
        device = getattr(self._encoder, "device", None)
        return device is None or str(device).startswith("cpu")

    def __call__(self, pixels: torch.Tensor, seeds: Sequence[int], names: Sequence[str]) -> Encoded:
        """Encode [B, H, W, 3] uint8 pixels, or [B, 3, H, W] floats; `seeds` and `names` have one per item."""
        import torch

        with self._turn:
            began = time.monotonic()
            try:
                device = getattr(self._encoder, "device", None)
                images = pixels if device is None else pixels.to(device, non_blocking=True)
                images = normalize(images) if images.dtype == torch.uint8 else images
                plain = self._halving(images, names)
                flipped = self._halving(images.flip(3), names) if self._flip else None
                noises = [torch.Generator().manual_seed(seed) for seed in seeds]
                done = Encoded(self._finish(*plain, noises), None, [None] * len(seeds))
                if flipped is not None:
                    done.flipped = self._finish(*flipped, noises)
                self._mend(done, images, seeds, names)
                return done
            finally:
                self.busy += time.monotonic() - began

    def _halving(self, images: torch.Tensor, names: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode in as few runs as memory allows; the size that went well is remembered per image size.

        Raises:
            KohyaBucketError: one image alone needs more.
        """
        import torch

        shape = tuple(images.shape[1:])
        size = min(len(images), self._largest.get(shape, len(images)))
        while True:
            parts: list[tuple[torch.Tensor, torch.Tensor | None]] = []
            try:
                parts.extend(self._raw(images[at : at + size]) for at in range(0, len(images), size))
                break
            except (RuntimeError, MemoryError) as error:
                text = str(error).lower()
                full = isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text
                if not full:
                    raise
                if size == 1:
                    raise KohyaBucketError(
                        f"{names[len(parts)]}: out of memory at {shape[2]}x{shape[1]} pixels, with this image alone; "
                        "what was encoded before is stored: use a smaller resolution, a narrower --dtype or another "
                        "--device"
                    ) from error
            size = max(1, size // 2)
            self._largest[shape] = size
            self._say(f"out of memory at {shape[2]}x{shape[1]}: continuing with batches of {size}")
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        spreads = [spread for _, spread in parts if spread is not None]
        return torch.cat([part for part, _ in parts]), torch.cat(spreads) if spreads else None

    def _raw(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        import torch

        with torch.inference_mode():
            if isinstance(self._encoder, PosteriorEncoder):
                return self._encoder.posterior(images)
            return self._encoder.encode(images), None

    def _finish(self, mean: torch.Tensor, spread: torch.Tensor | None, noises: list[torch.Generator]) -> torch.Tensor:
        """Sample, or keep mean and standard deviation; float32 on the CPU."""
        import torch

        mean = mean.float().cpu()
        if spread is None:
            return mean
        spread = spread.float().cpu()
        if self._kind == "posterior":
            return torch.stack([mean, spread], dim=1)
        noise = torch.stack([torch.randn(mean.shape[1:], generator=generator) for generator in noises])
        return mean + spread * noise

    def _mend(self, done: Encoded, images: torch.Tensor, seeds: Sequence[int], names: Sequence[str]) -> None:
        """Encode items that are not finite again in float32; name those that stay so."""
        import torch

        parts = [done.plain] if done.flipped is None else [done.plain, done.flipped]
        # By numpy: waking torch's threads for so little takes longer, and the device waits.
        finite = np.logical_and.reduce([np.isfinite(part.numpy()).reshape(len(part), -1).all(axis=1) for part in parts])
        for k in np.flatnonzero(~finite).tolist():
            wide = getattr(self._encoder, "in_float32", None)
            if wide is None:
                done.bad[k] = "its latent is not finite (NaN or infinity)"
                continue
            dtype = str(getattr(self._encoder, "dtype", "its type")).removeprefix("torch.")
            self._say(f"{names[k]}: not finite in {dtype}, encoded again in float32")
            noise = [torch.Generator().manual_seed(seeds[k])]
            with wide():
                image = images[k : k + 1]
                done.plain[k] = self._finish(*self._raw(image), noise)[0]
                if done.flipped is not None:
                    done.flipped[k] = self._finish(*self._raw(image.flip(3)), noise)[0]
            if not all(torch.isfinite(part[k]).all() for part in parts):
                done.bad[k] = "its latent is not finite (NaN or infinity), in float32 either"
