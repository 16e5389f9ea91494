"""One batch through the encoder, whatever happens: halved when memory runs out, in float32 where it overflowed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kohya_bucket.latents.vae.encoder import PosteriorEncoder, VAEEncoder

if TYPE_CHECKING:
    import torch

__all__ = ["BatchEncoder", "Encoded", "noise_seed", "normalize"]


@dataclass
class Encoded:
    """Latents of a batch, float32 on the CPU; `bad[k]` says what is wrong with item k, or None."""

    plain: torch.Tensor
    flipped: torch.Tensor | None
    bad: list[str | None]


def normalize(pixels: torch.Tensor) -> torch.Tensor:
    """[B, H, W, 3] uint8 to [B, 3, H, W] float32 in -1..1, by the operations sd-scripts' transforms use."""
    return pixels.permute(0, 3, 1, 2).float().div(255).sub(0.5).div(0.5).contiguous()


def noise_seed(seed: int, source: str, collection: str = "") -> int:
    """Seed of one item's noise: the same whatever batch, rank or run encodes it."""
    text = f"{seed}/{collection}/{source}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class BatchEncoder:
    """Runs batches through an encoder.

    Args:
        encoder: any `VAEEncoder`; with `posterior` it is sampled here, with noise that belongs to the item.
        kind: "latents" or "posterior".
        flip: encode the mirrored images too.
        say: called with a line of text for whatever a user should know.
    """

    def __init__(self, encoder: VAEEncoder, kind: str, flip: bool, say: Callable[[str], None]) -> None:
        self._encoder = encoder
        self._kind = kind
        self._flip = flip
        self._say = say
        self._largest: dict[tuple[int, ...], int] = {}

    @property
    def on_processor(self) -> bool:
        """The encoder takes its pixels where they are decoded."""
        device = getattr(self._encoder, "device", None)
        return device is None or str(device).startswith("cpu")

    def __call__(self, pixels: torch.Tensor, seeds: Sequence[int], names: Sequence[str]) -> Encoded:
        """Encode [B, H, W, 3] uint8 pixels, or [B, 3, H, W] floats; `seeds` and `names` have one per item."""
        import torch

        device = getattr(self._encoder, "device", None)
        images = pixels if device is None else pixels.to(device, non_blocking=True)
        images = normalize(images) if images.dtype == torch.uint8 else images
        plain, spread = self._halving(images)
        flipped, flipped_spread = self._halving(images.flip(3)) if self._flip else (None, None)
        noises = [torch.Generator().manual_seed(seed) for seed in seeds]
        done = Encoded(
            self._finish(plain, spread, noises),
            None if flipped is None else self._finish(flipped, flipped_spread, noises),
            [None] * len(seeds),
        )
        self._mend(done, images, seeds, names)
        return done

    def _halving(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Encode in as few runs as memory allows; the size that went well is remembered per image size."""
        import torch

        shape = tuple(images.shape[1:])
        size = min(len(images), self._largest.get(shape, len(images)))
        while True:
            try:
                parts = [self._raw(images[at : at + size]) for at in range(0, len(images), size)]
                break
            except (RuntimeError, MemoryError) as error:
                if size == 1 or not _out_of_memory(error):
                    raise
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
            self._say(f"{names[k]}: not finite in {_type_of(self._encoder)}, encoded again in float32")
            noise = [torch.Generator().manual_seed(seeds[k])]
            with wide():
                image = images[k : k + 1]
                done.plain[k] = self._finish(*self._raw(image), noise)[0]
                if done.flipped is not None:
                    done.flipped[k] = self._finish(*self._raw(image.flip(3)), noise)[0]
            if not all(torch.isfinite(part[k]).all() for part in parts):
                done.bad[k] = "its latent is not finite (NaN or infinity), in float32 either"


def _out_of_memory(error: Exception) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "can't allocate memory" in text


def _type_of(encoder: Any) -> str:
    return str(getattr(encoder, "dtype", "its type")).removeprefix("torch.")
