"""Captions of a store, encoded on a Ray cluster."""

from __future__ import annotations

import hashlib
import os
import platform
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.on_ray.actors import Actors
from kohya_bucket.latents.on_ray.encode_on_ray import check_seen
from kohya_bucket.latents.store.contents import Assigned, Generations
from kohya_bucket.latents.store.exact_arrays import pack
from kohya_bucket.latents.store.writer import StoreWriter
from kohya_bucket.latents.text.captions import Caption, Encoding, caption_bytes
from kohya_bucket.latents.text.precompute_text import TextReport, captions_to_do
from kohya_bucket.texts import counted

__all__ = ["text_on_ray"]

_MOST = 1024


@dataclass(frozen=True)
class _TextFacts:
    encoding: Encoding
    place: str

    @property
    def identity(self) -> str:
        return repr(self.encoding)


@dataclass(frozen=True)
class _Run:
    root: str
    name: str
    above: int
    batch_size: int


class _TextOnRay:
    """The actor: it holds text encoders, and turns captions into shards of their outputs."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._turn = threading.Lock()

    def load(self) -> _TextFacts:
        """Load the models."""
        self._encoder = self._make()
        self._encoding = Encoding(self._encoder.weights, self._encoder.tokens)
        return _TextFacts(self._encoding, platform.node())

    def encode(self, captions: list[str], run: _Run) -> tuple[list[str], str]:
        """Names of the shards that were written, and where this is."""
        key = hashlib.blake2b(caption_bytes(captions), digest_size=8).hexdigest()
        assigned = Assigned(run.above, f"{self._encoding!r} {run.name} {key}")
        writer = StoreWriter(run.root, flush_seconds=None, assigned=assigned)
        for start in range(0, len(captions), run.batch_size):
            batch = captions[start : start + run.batch_size]
            with self._turn:
                outputs = self._encoder.encode(batch)
            for text, arrays in zip(batch, outputs, strict=True):
                packed = {name: pack(np.asarray(array)) for name, array in arrays.items()}
                writer.add_text(Caption(text).entry(run.name, self._encoding), packed)
        writer.flush()
        return assigned.shards, platform.node()


def text_on_ray(
    store: str | os.PathLike[str], make: Callable[[], Any], *, name: str = "text", batch_size: int = 8,
    concurrency: int | None = None, on_gpu: bool = True, progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> TextReport:  # fmt: skip
    """As `precompute_text`, by actors on a Ray cluster, each with the encoder that `make` loads there.

    Raises:
        KohyaBucketError: as `precompute_text`; Ray is missing; or what an actor raised.
    """
    with Actors[_TextFacts](_TextOnRay, make, concurrency, on_gpu=on_gpu, say=say) as crew:
        cache, to_do, report = captions_to_do(store, crew.facts().encoding, name)
        layout, seen = cache.opened.layout, set[str]()
        run = _Run(os.fspath(layout.root), name, Generations(layout).greatest(), batch_size)
        lost = 0
        try:
            for captions, done in crew.work(
                _pieces(to_do, batch_size), lambda actor, captions: actor.encode.remote(captions, run)
            ):
                if done is None:
                    lost += len(captions)
                    continue
                shards, place = done
                if place not in seen:
                    check_seen(layout, shards, place)
                    seen.add(place)
                report.encoded += len(captions)
                if progress is not None:
                    progress(report.encoded, len(to_do))
        finally:
            cache.flush(index=True)
    if lost:
        raise KohyaBucketError(
            f"{counted(lost, 'caption')} could not be encoded, since the process that did it ended each time; all "
            "others are done: see Ray's logs, perhaps for want of memory"
        )
    return report


def _pieces(captions: list[str], batch_size: int) -> Iterator[list[str]]:
    size = max(batch_size, min(_MOST, -(-len(captions) // 64)) // batch_size * batch_size)
    for start in range(0, len(captions), size):
        yield captions[start : start + size]
