"""Latents by the trainer's own strategy, which never waits for images or for the disk.

Of the pipeline (`latents/encode/pipeline.py`) this brings the trainer's own function that loads, resizes and normalizes
an image, and its strategy, from which what it would save is taken.

A sampled latent's noise depends on the run's seed, the image's name and its size alone, whatever batch, process or run
encodes it, and nothing is drawn from the generators that training goes on with.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kohya_bucket.buckets.sizes import Size
from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import ConfigError, KohyaBucketError, may_pass, reading
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.images.listing import is_folder_away, refuse_if_away
from kohya_bucket.latents.encode.pipeline import Caching, Reader, threads
from kohya_bucket.latents.vae.batches import BatchLimit
from kohya_bucket.latents.vae.device import SideStream, await_copy
from kohya_bucket.latents.vae.encoder import noise_of_images, noise_seed
from kohya_bucket.texts import one_line
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.caching.session import refuse_not_finite
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kohya_bucket")

Load = Callable[[list[Any], bool, bool], tuple[Any, list[Any], list[Any], list[Any]]]
_MOST_WORKERS = 16


class Condition(NamedTuple):
    """What the images of a batch have in common; the size is (width, height)."""

    bucket: Size
    flip_aug: bool
    alpha_mask: bool
    random_crop: bool


class _Loaded(NamedTuple):
    """What the trainer's function makes of images: [B, 3, H, W] pixels in -1..1, and a list each of the rest."""

    pixels: torch.Tensor
    alpha_masks: list[Any]
    original_sizes: list[Any]
    crop_ltrbs: list[Any]


@dataclass
class _Batch:
    """Images of one condition, ready to be encoded; `copied` is the CUDA event after which they are on the device."""

    infos: list[Any]
    condition: Condition
    loaded: _Loaded
    copied: torch.cuda.Event | None = None

    def part(self, cut: slice) -> _Batch:
        return _Batch(self.infos[cut], self.condition, _Loaded(*(values[cut] for values in self.loaded)), self.copied)


@dataclass
class EncodingLoop:
    """One caching call over the images of a dataset that have no latents yet.

    Args:
        strategy: the trainer's, of any model family.
        model: the VAE that it encodes with.
        load: the trainer's function that makes tensors of images.
        options: what to do with an image that cannot be read.
        caching: keeps what the strategy would have saved of a batch, the arguments of each image.
        to_disk: the strategy saves; else it gives the latents to the images.
    """

    strategy: Any
    model: Any
    load: Load
    options: AdapterOptions
    caching: Caching
    to_disk: bool
    current: ClassVar[EncodingLoop | None] = None  # the one that runs now
    _running: _Batch | None = field(default=None, init=False)
    _saved: list[tuple[Any, ...]] = field(default_factory=list, init=False)
    _began: float = field(default=0.0, init=False)
    _put_off: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        import torch

        device = getattr(self.model, "device", None)
        self._device = device if isinstance(device, torch.device) and device.type == "cuda" else torch.device("cpu")
        self._side_stream = SideStream(self._device)
        self._seed = torch.initial_seed()
        batch_size = int(self.strategy.batch_size or 1)
        is_known = self.strategy.cache_suffix in {family.suffix for family in ARCHITECTURES.values()}
        self._limit = BatchLimit(self._device, None if is_known and batch_size == 1 else batch_size)

    def run(self, to_do: Sequence[tuple[Any, Condition]], processes: int) -> None:
        """Encode images; neighbours in one bucket share a batch.

        Raises:
            KohyaBucketError: an image cannot be read, and `on_bad_image` is "stop"; or one cannot be read now; or a
                latent is not finite.
        """
        import torch
        from tqdm import tqdm

        if not to_do:
            return
        workers = max(1, min((os.cpu_count() or 1) // processes, _MOST_WORKERS, len(to_do)))
        reader = Reader[tuple[Any, Condition], _Loaded](
            read=self._load,
            shape=lambda item: item[1],
            most=lambda condition: self._limit.most(condition.bucket),
            nbytes=_bytes_of,
            failed=self._failed,
            further=2 * workers,
        )
        on_gpu = [self._device] if self._device.type == "cuda" else []
        EncodingLoop.current = self
        try:
            with (
                torch.random.fork_rng(on_gpu), threads(workers, "load") as pool,
                tqdm(total=len(to_do), unit=" images", disable=None if is_first_process() else True) as bar,
            ):  # fmt: skip
                for batch in self.caching.ahead(itertools.starmap(self._staged, reader.batches(to_do, pool))):
                    self._encode(batch)
                    bar.update(len(batch.infos))
        finally:
            EncodingLoop.current = None

    # -- ahead of the encoder, on threads ----------------------------------------------------------

    def _load(self, item: tuple[Any, Condition]) -> _Loaded:
        info, condition = item
        return _Loaded(*self.load([info], condition.alpha_mask, condition.random_crop))

    def _failed(self, item: tuple[Any, Condition], error: Exception) -> bool:
        """An image that cannot be read now is tried once more, after all others: left out of the caches and found
        readable by the training, it would have no latents.
        """
        info, _ = item
        path = str(info.absolute_path)
        if isinstance(error, ConfigError):
            raise error
        if not may_pass(error) and not (isinstance(error, FileNotFoundError) and is_folder_away(path)):
            leave_out(info, error, self.options)
            self.caching.to_do -= 1
        elif id(info) in self._put_off:  # for the second time: the run ends
            if isinstance(error, OSError):
                refuse_if_away(path, error)
            with reading(path):
                raise error
        else:
            self._put_off.add(id(info))
            return True
        return False

    def _staged(self, items: list[tuple[Any, Condition]], loaded: list[_Loaded]) -> _Batch:
        """On the device, or on its way there; the strategy copies it where no memory is left beside what runs."""
        batch = _joined(loaded)
        pixels, copied = self._side_stream.send(batch.pixels)
        return _Batch([info for info, _ in items], items[0][1], batch._replace(pixels=pixels), copied)

    # -- the encoder ---------------------------------------------------------------------------------

    def _encode(self, batch: _Batch) -> None:
        """By the strategy, in as few runs as memory allows."""
        bucket = batch.condition.bucket
        self._limit.in_parts(
            len(batch.infos), bucket, lambda cut: self._encode_at_once(batch.part(cut)), logger.warning
        )

    def _encode_at_once(self, batch: _Batch) -> None:
        names = [f"{Path(info.absolute_path).name} {batch.condition.bucket}" for info in batch.infos]
        seeds = [noise_seed(self._seed, name) for name in names]
        self._running, self._saved = batch, []
        self._began = time.monotonic()
        self._seed_generators(seeds[0])
        with noise_of_images(seeds):
            self.strategy.cache_batch_latents(self.model, batch.infos, *batch.condition[1:])
        self.caching.busy += time.monotonic() - self._began
        self._running = None
        self._refuse_not_finite(batch.infos)
        width, height = batch.condition.bucket
        self.caching.put(self._saved, len(batch.infos), len(batch.infos) * width * height)

    def _refuse_not_finite(self, infos: Sequence[Any]) -> None:
        """Raise `LatentStoreError` for latents of the batch that are NaN or infinite, kept in memory or to be saved."""
        in_float16 = str(getattr(self.model, "dtype", "")) == "torch.float16"
        what_to_do = ": this VAE overflows in float16, so train with --no_half_vae" if in_float16 else ""
        if self.to_disk:
            made = [(arguments[1], *arguments[4:5]) for arguments in self._saved]
        else:
            made = [(info.latents, getattr(info, "latents_flipped", None)) for info in infos]
        for info, latents in zip(infos, made, strict=False):  # a strategy may save otherwise than by its method
            refuse_not_finite(latents, f"{info.absolute_path}: its latent", what_to_do)

    def _seed_generators(self, seed: int) -> None:
        """For what a strategy draws otherwise than for its batch at once."""
        import torch

        torch.default_generator.manual_seed(seed)
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                torch.cuda.manual_seed(seed)

    def take(self, *arguments: Any) -> None:
        """In place of the strategy's `save_latents_to_disk`."""
        self._saved.append(arguments)

    def loaded(self, infos: Sequence[Any]) -> _Loaded | None:
        """In place of the trainer's loading of images: what is ready, where these are the images that run now."""
        batch = self._running
        if batch is None or list(map(id, infos)) != list(map(id, batch.infos)):
            return None
        await_copy(batch.loaded.pixels, batch.copied)
        self._began = time.monotonic()
        return batch.loaded


def _bytes_of(item: tuple[Any, Condition]) -> int:
    """What an image takes while it is loaded: its own pixels in bytes, and those of its bucket as floats."""
    info, condition = item
    width, height = info.image_size
    return int(4 * width * height + 16 * condition.bucket[0] * condition.bucket[1])


def _joined(loaded: Sequence[_Loaded]) -> _Loaded:
    import torch

    pixels, *lists = zip(*loaded, strict=True)
    return _Loaded(torch.cat(pixels), *([one for values in column for one in values] for column in lists))


# Images that cannot be read.


def leave_out(info: Any, why: BaseException, options: AdapterOptions) -> None:
    """Name an image that cannot be cached; training finds it unreadable in its turn, and leaves it out.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop".
    """
    line = not_loaded(why)
    if options.on_bad_image == "stop":
        raise KohyaBucketError(f"{info.absolute_path}: {line}: repair or remove it, or leave on_bad_image out")
    info.latents_npz = None
    logger.warning("%s", one_line(f"{info.absolute_path} is left out: {line}"))
