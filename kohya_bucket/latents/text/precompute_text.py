"""Encode the captions of a store of latents once: only what is missing or stale, by as many processes as there are."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.store.exact_arrays import Array
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.text.captions import TEXT_FOLDER, Caption, Encoding, TextCache

__all__ = ["TextEncoder", "TextReport", "captions_to_do", "precompute_text"]


class TextEncoder(Protocol):
    """What `precompute_text` encodes with.

    Attributes:
        weights: hash of its weights, "" where nobody knows; others are encoded again.
        tokens: how captions become tokens, in one line of words; what says otherwise is encoded again.
    """

    weights: str
    tokens: str

    def encode(self, captions: Sequence[str]) -> list[Mapping[str, Array]]:
        """For each caption its outputs by name; bfloat16 as float32, which is stored as bfloat16 again."""
        ...


@dataclass
class TextReport:
    """What a run did.

    Attributes:
        total: distinct captions.
        current: of this process' share, how many were there already.
        encoded: encoded by this process.
        reasons: how many captions were to do, by reason.
    """

    total: int
    current: int = 0
    encoded: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


def precompute_text(
    store: str | os.PathLike[str],
    encoder: TextEncoder,
    *,
    name: str = "text",
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
    rank: int = 0,
    processes: int = 1,
) -> TextReport:
    """Encode each distinct caption of the latents in `store`, for `BucketedLatentDataset(store, text_outputs=name)`.

    Each of several processes takes its share, if it says which one it is. What is encoded when the run is interrupted
    stays.

    Args:
        store: folder of a store of latents; the outputs go to its folder `text`.
        name: the outputs' own, to keep those of several encoders apart.
        batch_size: captions per run of the encoder.
        progress: called with (done, to do) in captions.
        rank, processes: this is process `rank` of so many.

    Raises:
        LatentStoreError: there is no store, its folder cannot be written, or an output cannot be stored.
    """
    encoding = Encoding(encoder.weights, encoder.tokens)
    cache, to_do, report = captions_to_do(store, encoding, name, rank, processes)
    try:
        for start in range(0, len(to_do), batch_size):
            batch = to_do[start : start + batch_size]
            for text, arrays in zip(batch, encoder.encode(batch), strict=True):
                cache.save(Caption(text), encoding, arrays)
            report.encoded += len(batch)
            if progress is not None:
                progress(report.encoded, len(to_do))
    finally:
        cache.flush(index=True)
    return report


def captions_to_do(
    store: str | os.PathLike[str], encoding: Encoding, name: str, rank: int = 0, ranks: int = 1
) -> tuple[TextCache, list[str], TextReport]:
    """The outputs that are there, the captions of a process' share that must be encoded, by length, and the report.

    Raises:
        LatentStoreError: there is no store, or its folder cannot be written.
    """
    latents = LatentStore(store)
    texts = {text or "" for text in latents.table["caption"].unique().to_pylist()}
    if not texts:
        raise LatentStoreError(f"{latents.layout.root} holds no latents, so no captions: run `kohya-bucket precompute`")
    share = sorted(texts)[rank::ranks]
    cache = TextCache(latents.layout.root / TEXT_FOLDER, name)
    cache.refresh()
    reasons = {text: cache.why_missing(Caption(text).key, encoding) for text in share}
    to_do = sorted((text for text in share if reasons[text]), key=len)
    counts = Counter(str(reason) for text in to_do for reason in reasons[text][:1])
    return cache, to_do, TextReport(len(texts), len(share) - len(to_do), reasons=dict(counts))
