"""Latents by the trainer's own strategy, which never waits for images or for the disk.

- Threads load, resize and normalize images ahead of the encoder, by the trainer's own function, one image a call.
- One thread puts neighbours of one bucket together, and copies them to the device, while the batch before them runs.
- What a strategy would save is taken from it, and saved on a thread of its own while the next batch runs.

A sampled latent's noise depends on the run's seed, the image's name and its size alone, whatever batch, process or run
encodes it, and nothing is drawn from the generators that training goes on with.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from kohya_bucket.buckets.sizes import Size
from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import ConfigError, KohyaBucketError, may_pass, reading
from kohya_bucket.images.formats import UnreadableImageError, not_loaded
from kohya_bucket.images.listing import is_folder_away, refuse_if_away
from kohya_bucket.latents.encode.worker import lower_priority
from kohya_bucket.latents.vae.batches import BatchLimit, is_out_of_memory
from kohya_bucket.latents.vae.device import SideStream, await_copy
from kohya_bucket.latents.vae.encoder import noise_seed
from kohya_bucket.texts import one_line
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.caching.session import refuse_not_finite
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("kohya_bucket")

Load = Callable[[list[Any], bool, bool], tuple[Any, list[Any], list[Any], list[Any]]]
_MOST_WORKERS = 16
_MOST_AHEAD = 2 << 30  # bytes of images that are loaded ahead, as files are decoded and as floats


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

    def part(self, start: int, stop: int) -> _Batch:
        cut = slice(start, stop)
        return _Batch(self.infos[cut], self.condition, _Loaded(*(values[cut] for values in self.loaded)), self.copied)


@dataclass
class EncodingLoop:
    """One caching call over the images of a dataset that have no latents yet.

    Args:
        strategy: the trainer's, of any model family.
        model: the VAE that it encodes with.
        load: the trainer's function that makes tensors of images.
        options: what to do with an image that cannot be read.
        keep: takes what the strategy would have saved of a batch: the arguments of each image. None where it saves
            nothing.
    """

    strategy: Any
    model: Any
    load: Load
    options: AdapterOptions
    keep: Callable[[list[tuple[Any, ...]]], object] | None = None
    current: ClassVar[EncodingLoop | None] = None  # the one that runs now
    _running: _Batch | None = field(default=None, init=False)
    _saved: list[tuple[Any, ...]] = field(default_factory=list, init=False)
    _began: float = field(default=0.0, init=False)
    _busy: float = field(default=0.0, init=False)
    _left_out: int = field(default=0, init=False)

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
        started, done = time.monotonic(), 0
        on_gpu = [self._device] if self._device.type == "cuda" else []
        with (
            self._as_current(), torch.random.fork_rng(on_gpu),
            _pool(1, "stage") as stage, _pool(workers, "load") as pool,
            tqdm(total=len(to_do), unit=" images", disable=not is_first_process()) as bar,
        ):  # fmt: skip
            batches = self._batches(deque(to_do), pool, workers)
            following = stage.submit(next, batches, None)
            while (batch := following.result()) is not None:
                following = stage.submit(next, batches, None)
                self._encode(batch)
                done += len(batch.infos)
                bar.total = len(to_do) - self._left_out
                bar.update(len(batch.infos))
        seconds = time.monotonic() - started
        if is_first_process() and done:
            logger.info(
                "%d latents were encoded in %.1f s: %.1f images/s; the encoder ran %.0f%% of the time",
                done, seconds, done / seconds, 100 * self._busy / seconds,
            )  # fmt: skip

    @contextlib.contextmanager
    def _as_current(self) -> Iterator[None]:
        EncodingLoop.current = self
        try:
            yield
        finally:
            EncodingLoop.current = None

    # -- ahead of the encoder, on threads ----------------------------------------------------------

    def _batches(self, to_do: deque[tuple[Any, Condition]], pool: ThreadPoolExecutor, workers: int) -> Iterator[_Batch]:
        """Batches as they are ready. Images are loaded for the one after next beforehand, and no further.

        An image that cannot be read now is tried once more, after all others: left out of the caches and found
        readable by the training, it would have no latents.
        """
        loading: deque[tuple[Any, Condition, Future[_Loaded]]] = deque()
        put_off: set[int] = set()

        def load_ahead(most: int) -> None:
            """Begin to load what a batch of `most` still lacks, and a few images beyond it, as far as memory allows."""
            held = sum(_bytes_of(info, condition) for info, condition, _ in loading)
            while to_do and len(loading) < most + 2 * workers:
                held += _bytes_of(*to_do[0])
                if loading and held > _MOST_AHEAD:
                    break
                info, condition = to_do.popleft()
                loading.append((info, condition, pool.submit(self._load, info, condition)))

        while to_do or loading:
            load_ahead(1)
            condition = loading[0][1]
            most = self._limit.most(condition.bucket)
            infos: list[Any] = []
            loaded: list[_Loaded] = []
            while loading and loading[0][1] == condition and len(infos) < most:
                info, _, future = loading.popleft()
                load_ahead(most)
                try:
                    loaded.append(future.result())
                    infos.append(info)
                except CancelledError:  # the run ends half-way
                    return
                except (MemoryError, ConfigError):
                    raise
                except Exception as why:  # whatever a reader raises at what it does not expect
                    path = str(info.absolute_path)
                    if not may_pass(why) and not (isinstance(why, FileNotFoundError) and is_folder_away(path)):
                        leave_out(info, why, self.options)
                        self._left_out += 1
                    elif id(info) in put_off:  # for the second time: the run ends
                        if isinstance(why, OSError):
                            refuse_if_away(path, why)
                        with reading(path):
                            raise
                    else:
                        put_off.add(id(info))
                        to_do.append((info, condition))
            if infos:
                yield self._staged(_Batch(infos, condition, _joined(loaded)))

    def _load(self, info: Any, condition: Condition) -> _Loaded:
        return _Loaded(*self.load([info], condition.alpha_mask, condition.random_crop))

    def _staged(self, batch: _Batch) -> _Batch:
        """On the device, or on its way there; the strategy copies it where no memory is left beside what runs."""
        pixels, copied = self._side_stream.send(batch.loaded.pixels)
        return _Batch(batch.infos, batch.condition, batch.loaded._replace(pixels=pixels), copied)

    # -- the encoder ---------------------------------------------------------------------------------

    def _encode(self, batch: _Batch) -> None:
        """By the strategy, in as few runs as memory allows."""
        count = len(batch.infos)
        size, at = count, 0
        while at < count:
            part = batch.part(at, at + size)
            try:
                self._encode_at_once(part)
            except Exception as error:
                if len(part.infos) == 1 or not is_out_of_memory(error):
                    raise
            else:
                at += len(part.infos)
                continue
            # Here, where the error that kept the run's tensors is gone, memory can be freed.
            size = self._limit.ran_out(len(part.infos), part.condition.bucket)
            width, height = part.condition.bucket
            logger.warning("out of memory at %dx%d: continuing with batches of %d", width, height, size)

    def _encode_at_once(self, batch: _Batch) -> None:
        names = [f"{Path(info.absolute_path).name} {batch.condition.bucket}" for info in batch.infos]
        seeds = [noise_seed(self._seed, name) for name in names]
        self._running, self._saved = batch, []
        self._began = time.monotonic()
        self._limit.begin()
        self._seed_generators(seeds[0])
        with noise_of_images(seeds):
            self.strategy.cache_batch_latents(self.model, batch.infos, *batch.condition[1:])
        self._limit.went_well(len(batch.infos), batch.condition.bucket)
        self._busy += time.monotonic() - self._began
        self._running = None
        self._refuse_not_finite(batch.infos)
        if self.keep is not None:
            self.keep(self._saved)

    def _refuse_not_finite(self, infos: Sequence[Any]) -> None:
        """Raise `LatentStoreError` for latents of the batch that are NaN or infinite, kept in memory or to be saved."""
        in_float16 = str(getattr(self.model, "dtype", "")) == "torch.float16"
        what_to_do = ": this VAE overflows in float16, so train with --no_half_vae" if in_float16 else ""
        if self.keep is None:
            made = [(info.latents, getattr(info, "latents_flipped", None)) for info in infos]
        else:
            made = [(arguments[1], *arguments[4:5]) for arguments in self._saved]
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


@contextlib.contextmanager
def _pool(workers: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Threads that give way to the encoder's; where it ends half-way, what they have not begun is not done."""
    pool = ThreadPoolExecutor(workers, f"kohya-bucket-{name}", initializer=lower_priority)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _bytes_of(info: Any, condition: Condition) -> int:
    """What an image takes while it is loaded: its own pixels in bytes, and those of its bucket as floats."""
    width, height = info.image_size
    return int(4 * width * height + 16 * condition.bucket[0] * condition.bucket[1])


def _joined(loaded: Sequence[_Loaded]) -> _Loaded:
    import torch

    pixels, *lists = zip(*loaded, strict=True)
    return _Loaded(torch.cat(pixels), *([one for values in column for one in values] for column in lists))


@contextlib.contextmanager
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


def check_shape(size: Size, resized_size: Size) -> None:
    """Refuse an image that has not the shape that its bucket was chosen for: sd-scripts would distort it.

    Every rule scales an image by one factor, and rounds each side to the nearest pixel.

    Args:
        size: (width, height) of the image as it was loaded.
        resized_size: that it is to be resized to; a `ResizedSize` where metadata states what `size` should be: then
            nothing is refused, and `plan` names it.

    Raises:
        UnreadableImageError: the sides are not scaled alike.
    """
    (width, height), (resized_width, resized_height) = size, resized_size
    if getattr(resized_size, "is_stated", False):
        return
    if 2 * abs(resized_width * height - resized_height * width) > width + height:
        raise UnreadableImageError(
            f"{width}x{height} pixels now, which is another shape than when its bucket was chosen: start again, if it "
            "was edited"
        )
