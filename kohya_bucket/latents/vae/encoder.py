"""The protocol of encoders, which any VAE can satisfy, and batches through one.

A batch is halved when memory runs out, and items that overflow are encoded again in float32.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.fingerprint import module_hash
from kohya_bucket.latents.finite import all_finite
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.vae.batches import MOST_TOGETHER, BatchLimit, is_out_of_memory
from kohya_bucket.latents.vae.device import SideStream, Span, await_copy

if TYPE_CHECKING:
    import torch


_Distribution = tuple["torch.Tensor", "torch.Tensor | None"]  # mean, and standard deviation where there is one
_MEMBERS = ("downsample_factor", "latent_channels", "scale_factor", "encode")


@runtime_checkable
class VAEEncoder(Protocol):
    """Encodes pixels into latents. Any model with these four members fits.

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
    """Raises `KohyaBucketError` for an object that lacks a member of `VAEEncoder`, such as a bare diffusers VAE."""
    missing = [name for name in _MEMBERS if not hasattr(encoder, name)]
    if missing:
        raise KohyaBucketError(
            f"encoder is a {type(encoder).__name__} without {', '.join(missing)}: an encoder has "
            f"{', '.join(_MEMBERS)} (see VAEEncoder)"
        )


def encoder_hash(encoder: Any) -> str:
    """Identity of an encoder: its `fingerprint`, else a hash of its weights, else of the name of its class.

    Weights are those of the encoder itself or of its attribute `vae`, `model` or `_vae`.
    """
    fingerprint = getattr(encoder, "fingerprint", None)
    if isinstance(fingerprint, str) and fingerprint:
        return fingerprint
    for module in (encoder, *(getattr(encoder, name, None) for name in ("vae", "model", "_vae"))):
        if hasattr(module, "state_dict"):
            return module_hash(module)
    kind = type(encoder)
    text = f"{kind.__module__}.{kind.__qualname__} {encoder.scale_factor}"
    return hashlib.blake2b(text.encode("utf-8"), digest_size=16).hexdigest()


def encoder_space(encoder: Any) -> LatentSpace:
    """What the numbers of `encoder` mean: raw if it has a posterior, else scaled."""
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
    """Seed of an item's noise, independent of batch, rank and run."""
    text = f"{seed}/{collection}/{source}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextmanager
def noise_of_images(seeds: Sequence[int]) -> Iterator[None]:
    """While a batch is encoded, the noise that is drawn for all of its images is each image's own, by its seed."""
    import torch
    from torch.overrides import TorchFunctionMode

    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    class OwnNoise(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            drawn = function(*args, **(kwargs or {}))
            if function in (torch.randn, torch.randn_like) and drawn.shape[:1] == (len(generators),):
                noise = [torch.randn(drawn.shape[1:], generator=generator) for generator in generators]
                drawn.copy_(torch.stack(noise))
            return drawn

    with OwnNoise():
        yield


@dataclass
class Running:
    """A batch in the encoder: its pixels on the device, and mean and deviation on their way to the CPU."""

    images: torch.Tensor
    seeds: Sequence[int]
    names: Sequence[str]
    plain: _Distribution
    flipped: _Distribution | None
    span: Span


class BatchEncoder:
    """Runs batches through an encoder, one at a time however many threads call it.

    Args:
        encoder: any `VAEEncoder`; with `posterior` it is sampled here, with noise that belongs to the item.
        say: called with a line of text for the user.
        together: images in one call of the encoder; None: as many as fit into memory, if the encoder states its device.

    Attributes:
        busy: seconds that finished batches were in the encoder.
    """

    def __init__(
        self, encoder: VAEEncoder, kind: str, flip: bool, say: Callable[[str], None], together: int | None = None
    ) -> None:
        import torch

        self._encoder = encoder
        self._kind = kind
        self._flip = flip
        self._say = say
        device = getattr(encoder, "device", None)
        self._device = torch.device("cpu" if device is None else device)
        self._on_gpu = self._device.type == "cuda"
        self._side_stream = SideStream(self._device)
        self._limit = BatchLimit(self._device, MOST_TOGETHER if together is None and device is None else together)
        self._turn = threading.Lock()
        self.busy = 0.0

    @property
    def on_processor(self) -> bool:
        """The encoder runs where images are decoded."""
        return str(self._device) == "cpu"

    def begin(self, pixels: torch.Tensor, seeds: Sequence[int], names: Sequence[str]) -> Running:
        """Encode [B, H, W, 3] uint8 pixels, or [B, 3, H, W] floats; `seeds` and `names` have one per item.

        A GPU only queues the work, and may still be busy with the previous batch.
        """
        import torch

        images, copied = self._side_stream.send(pixels)
        with self._turn:
            await_copy(images, copied)
            span = Span(self._device)
            images = normalize(images) if images.dtype == torch.uint8 else images
            plain = self._in_parts(images, names)
            flipped = self._in_parts(images.flip(3), names) if self._flip else None
            span.end()
        return Running(images, seeds, names, plain, flipped, span)

    def finish(self, running: Running) -> Encoded:
        """The latents of a batch; waits for the encoder."""
        import torch

        seconds = running.span.seconds()
        noises = [torch.Generator().manual_seed(seed) for seed in running.seeds]
        done = Encoded(self._sampled(*running.plain, noises), None, [None] * len(noises))
        if running.flipped is not None:
            done.flipped = self._sampled(*running.flipped, noises)
        self.busy += seconds
        self._mend(done, running)
        return done

    def _in_parts(self, images: torch.Tensor, names: Sequence[str]) -> _Distribution:
        """Encode in as few runs as memory allows. Raises `KohyaBucketError` for a single image that does not fit."""
        import torch

        height, width = images.shape[2:]
        parts: list[_Distribution] = []

        def run(part: slice) -> None:
            try:
                parts.append(self._raw(images[part]))
            except (RuntimeError, MemoryError) as error:
                if part.stop - part.start > 1 or not is_out_of_memory(error):
                    raise
                raise KohyaBucketError(
                    f"{names[part.start]}: out of memory at {width}x{height} pixels, with this image alone; earlier "
                    "images are stored: use a smaller resolution, a narrower --dtype or another --device"
                ) from error

        self._limit.in_parts(len(images), (width, height), run, self._say)
        spreads = [spread for _, spread in parts if spread is not None]
        return self._fetched(torch.cat([mean for mean, _ in parts]), torch.cat(spreads) if spreads else None)

    def _fetched(self, mean: torch.Tensor, spread: torch.Tensor | None) -> _Distribution:
        """As float32 on the CPU; from a GPU, valid once it has finished its queue."""
        mean = mean.float().to("cpu", non_blocking=self._on_gpu)
        return mean, None if spread is None else spread.float().to("cpu", non_blocking=self._on_gpu)

    def _raw(self, images: torch.Tensor) -> _Distribution:
        import torch

        with torch.inference_mode():
            if isinstance(self._encoder, PosteriorEncoder):
                return self._encoder.posterior(images)
            return self._encoder.encode(images), None

    def _sampled(self, mean: torch.Tensor, spread: torch.Tensor | None, noises: list[torch.Generator]) -> torch.Tensor:
        import torch

        if spread is None:
            return mean
        if self._kind == "posterior":
            return torch.stack([mean, spread], dim=1)
        noise = torch.stack([torch.randn(mean.shape[1:], generator=generator) for generator in noises])
        return mean + spread * noise

    def _mend(self, done: Encoded, running: Running) -> None:
        """Encode items that are not finite again in float32; mark those that stay so as bad."""
        import torch

        parts = [done.plain] if done.flipped is None else [done.plain, done.flipped]
        for k in (k for k in range(len(done.plain)) if not all(all_finite(part[k].numpy()) for part in parts)):
            wide = getattr(self._encoder, "in_float32", None)
            if wide is None:
                done.bad[k] = "its latent is not finite (NaN or infinity)"
                continue
            dtype = str(getattr(self._encoder, "dtype", "its type")).removeprefix("torch.")
            name, image = running.names[k], running.images[k : k + 1]
            self._say(f"{name}: not finite in {dtype}, encoded again in float32")
            span = Span(self._device)
            with self._turn, wide():
                again = [self._fetched(*self._raw(image if n == 0 else image.flip(3))) for n in range(len(parts))]
            span.end()
            self.busy += span.seconds()
            noise = [torch.Generator().manual_seed(running.seeds[k])]
            for part, distribution in zip(parts, again, strict=True):
                part[k] = self._sampled(*distribution, noise)[0]
            if not all(all_finite(part[k].numpy()) for part in parts):
                done.bad[k] = "its latent is not finite (NaN or infinity), in float32 either"
