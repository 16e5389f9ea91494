"""musubi-tuner's own loops over items and captions, on the pipeline of `latents/encode/pipeline.py`.

Its loops keep what they do: batches by bucket, what is encoded with what, which files are removed. They are handed
items that are read ahead, batches as large as memory allows, and what they save is written behind them.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any

from kohya_bucket.latents.encode.pipeline import Reader, threads
from kohya_bucket.latents.vae.batches import MOST_TOGETHER, BatchLimit
from kohya_bucket.latents.vae.encoder import noise_of_images, noise_seed
from kohya_bucket.trainers.door.patching import Patches, Replacement
from kohya_bucket.trainers.door.shapes import Uses
from kohya_bucket.trainers.musubi.caches import holds_clips
from kohya_bucket.trainers.musubi.caching import Session, session_of

_POOL = "ThreadPoolExecutor"
_FIRST_CLIP, _FIRST_IMAGE = 1 << 29, 1 << 26  # bytes that an item may take, before one is read
_ROUNDING = 0.02  # mean difference, in shares of the mean, that a batch may make to one of its images

logger = logging.getLogger("kohya_bucket")


class ItemsAhead:
    """Stands in for a dataset's source and for the threads of the loop that goes through it.

    The loop gives its threads one function for each item, and asks ten times a second whether one has ended. Here the
    function it gives for the first item is done for those that follow, ahead of it, so each that it asks for is ready.
    """

    def __init__(self, source: Any, pool: ThreadPoolExecutor, workers: int, nbytes: int) -> None:
        self._source, self._pool, self._workers, self._nbytes = source, pool, workers, nbytes
        self._ready: Iterator[tuple[Any, Any]] | None = None
        self._next: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        fetches = iter(self._source)
        for first in islice(fetches, 1):
            self._fetches = chain([first], fetches)
            yield first
            assert self._ready is not None
            for ready in self._ready:
                self._next = ready[1]
                yield first

    def submit(self, function: Callable[..., Any], *fetch: Any) -> Future[Any]:
        """The next item, which `function` makes of its fetch, or which the fetch alone gives."""
        if self._ready is None:
            reader = Reader[Any, Any](
                read=lambda fetch_next: self._measured(function(fetch_next) if fetch else fetch_next()),
                shape=lambda _: None,
                most=lambda _: 1,
                nbytes=lambda _: self._nbytes,
                failed=_not_read,
                further=MOST_TOGETHER + 2 * self._workers,
            )
            self._ready = reader.ahead(self._fetches, self._pool)
            _, self._next = next(self._ready)
        done: Future[Any] = Future()
        done.set_result(self._next)
        self._next = None
        return done

    def shutdown(self, **_: Any) -> None:
        """Whoever made the threads ends them."""

    def _measured(self, result: Any) -> Any:
        self._nbytes = max(self._nbytes if self._ready else 0, _nbytes_of(result))
        return result


def _not_read(_: Any, error: Exception) -> bool:
    raise error


def _nbytes_of(result: Any) -> int:
    """Of all arrays in what a loop's function gives, and of the image that they were made from."""
    parts = list(result) if isinstance(result, (tuple, list)) else []
    if len(parts) == 2 and all(isinstance(part, int) for part in parts):
        return int(4 * parts[0] * parts[1])
    return int(getattr(result, "nbytes", 0)) + sum(map(_nbytes_of, parts))


@contextmanager
def loop_over(
    session: Session, dataset: Any, original: Callable[..., Iterator[Any]], num_workers: int, more: dict[str, Any]
) -> Iterator[Iterator[Any]]:
    """The batches of a dataset's own loop, of which a session picks the items; at the end all is saved and said."""
    inner = getattr(type(dataset), "_default_retrieve_text_encoder_output_cache_batches", None)
    reads = inner if session.captions_alone and inner is not None else original
    with session.picking(dataset):
        with session.caching.running(), ExitStack() as stack:
            if Uses(_POOL, "submit").problem(reads):  # it reads in another way
                yield original(dataset, num_workers, **more)
                return
            pool = stack.enter_context(threads(num_workers, "read"))
            nbytes = 0 if session.captions_alone else _FIRST_CLIP if holds_clips(dataset) else _FIRST_IMAGE
            ahead = dataset.datasource = ItemsAhead(dataset.datasource, pool, num_workers, nbytes)
            batches = iter(original(dataset, 1, **more))
            patches = Patches()
            module = sys.modules[reads.__module__]
            patches.apply([Replacement(module, _POOL, lambda *_, **__: ahead)], lambda _: False)
            try:
                first = list(islice(batches, 1))  # it makes its threads before it gives anything
            finally:
                patches.take_back()
            yield chain(first, batches)
        session.caching.say_speed()


class Together:
    """Encodes the batches of a program's loop, images in as few runs as memory allows.

    Args:
        encode: the program's function, which saves too.
        limit: of images in a run; None: batches are encoded as they come.
    """

    def __init__(self, encode: Callable[[list[Any]], None], limit: BatchLimit | None) -> None:
        self._encode, self._limit = encode, limit
        self._is_alike: bool | None = None  # whether an image's latent is the same in a batch
        self.session: Session | None = None

    def encode(self, batch: list[Any]) -> None:
        """In place of the program's function."""
        self.session = session = session_of(batch[0])
        began = time.monotonic()
        if self._limit is None or session is None:
            self._encode(batch)
        else:
            size: tuple[int, int] = tuple(batch[0].bucket_size[:2])
            self._limit.in_parts(len(batch), size, lambda part: self._run(session, batch[part]), logger.warning)
            dataset: Any = session.caches.dataset
            dataset.batch_size = self.most(dataset)
        if session is not None:
            session.caching.busy += time.monotonic() - began

    def most(self, dataset: Any) -> int:
        """How many images of a dataset its loop should put together."""
        own = int(getattr(dataset, _OWN, dataset.batch_size))
        if self._limit is None or holds_clips(dataset) or self._is_alike is False:
            return own
        return max(own, self._limit.most(tuple(dataset.resolution)))

    def _run(self, session: Session, batch: Sequence[Any]) -> None:
        if len(batch) > 1 and self._is_alike is None:
            self._try(session, list(batch))
        elif self._is_alike is False:
            for item in batch:
                self._encode([item])
        else:
            self._encode(list(batch))

    def _try(self, session: Session, batch: list[Any]) -> None:
        """Encode a first batch, and its first image alone: whether that makes a difference beyond rounding."""
        seeds = [noise_seed(0, item.item_key) for item in batch]
        made = list[list[Any]]()
        for items in (batch[:1], batch):
            with session.saved_later() as saved, noise_of_images(seeds[: len(items)]):
                self._encode(items)
            made.append(saved)
        self._is_alike = all(_alike(one.tensors, other.tensors) for one, other in zip(*made, strict=False))
        for item in batch if not self._is_alike else ():
            self._encode([item])
        for later in made[1] if self._is_alike else ():
            session.save(later)


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return False
    pairs = [(one[name].float(), other[name].float()) for name in one]
    return all(float((a - b).abs().mean()) <= _ROUNDING * float(a.abs().mean()) + 1e-6 for a, b in pairs)


_OWN = "_kohya_bucket_batch_size"


@contextmanager
def together(
    datasets: Sequence[Any], encode: Callable[[list[Any]], None], limit: BatchLimit | None
) -> Iterator[Callable[[list[Any]], None]]:
    """What a program's loop encodes with; meanwhile its datasets make batches as large as fit."""
    encoder = Together(encode, limit)
    try:
        for dataset in datasets if limit is not None else ():
            setattr(dataset, _OWN, dataset.batch_size)
            dataset.batch_size = encoder.most(dataset)
        yield encoder.encode
    except KeyboardInterrupt as interrupt:  # while a loop that is handed batches waits for the next
        if encoder.session is not None:
            encoder.session.caching.end(interrupt)
        raise
    finally:
        for dataset in datasets if limit is not None else ():
            dataset.batch_size = getattr(dataset, _OWN)


def limit_of(arguments: Any) -> BatchLimit:
    """How many images a program encodes at once, by its arguments."""
    import torch

    device = getattr(arguments, "device", None) or ("cuda" if torch.cuda.is_available() else "cpu")
    return BatchLimit(str(device), getattr(arguments, "batch_size", None))


def workers_of(num_workers: int, arguments: Any = None) -> int:
    """Threads that read: as many as the user asks for, or as there are processors."""
    return num_workers if getattr(arguments, "num_workers", None) is not None else os.cpu_count() or 1
