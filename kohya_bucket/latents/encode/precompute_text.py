"""Encode the captions of a store of latents once: only what is missing or stale, by as many processes as there are."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.captions import TEXT_FOLDER, Caption, CaptionItems, Encoding
from kohya_bucket.latents.encode.sinks import ShardSink
from kohya_bucket.latents.encode.worker import PrecomputeReport
from kohya_bucket.latents.store.exact_arrays import Array
from kohya_bucket.latents.store.latent_store import LatentStore


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


class TextRun:
    """The distinct captions of the latents in `store`, and which of a process' share must be encoded.

    Attributes:
        items: the captions of this share.
        to_do: positions of those that must be encoded, by length.

    Raises:
        LatentStoreError: there is no store, or its folder cannot be written.
    """

    def __init__(
        self, store: str | os.PathLike[str], encoding: Encoding, name: str, rank: int = 0, processes: int = 1
    ) -> None:
        latents = LatentStore(store)
        texts = sorted({text or "" for text in latents.table["caption"].unique().to_pylist()})
        root = latents.layout.root
        if not texts:
            raise LatentStoreError(f"{root} holds no latents, so no captions: run `kohya-bucket precompute`")
        self._all = CaptionItems(list(map(Caption, texts)), encoding, name)
        self._texts = texts[rank::processes]
        self.items = CaptionItems(self._all.captions[rank::processes], encoding, name)
        self.sink = ShardSink[tuple[Sequence[int], Sequence[Mapping[str, Array]]]](
            root / TEXT_FOLDER, self.items, lambda writer, batch: self.items.add(writer, *batch)
        )
        missing, reasons = self.sink.missing()
        self.to_do: list[int] = sorted(np.flatnonzero(missing).tolist(), key=lambda i: len(self._texts[i]))
        self.report = PrecomputeReport(
            root / TEXT_FOLDER, len(texts), len(self.items) - len(self.to_do), reasons=reasons,
            elsewhere=len(texts) - len(self.items),
        )  # fmt: skip

    def texts(self, items: Sequence[int]) -> list[str]:
        return [self._texts[i] for i in items]

    def finish(self) -> None:
        """Commit and index."""
        self.sink.flush()
        self.report.notes += self.sink.finish(self._all)


def precompute_text(
    store: str | os.PathLike[str], encoder: TextEncoder, *, name: str = "text", batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None, rank: int = 0, processes: int = 1,
) -> PrecomputeReport:  # fmt: skip
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
    run = TextRun(store, Encoding(encoder.weights, encoder.tokens), name, rank, processes)
    try:
        for start in range(0, len(run.to_do), batch_size):
            batch = run.to_do[start : start + batch_size]
            run.sink.write((batch, encoder.encode(run.texts(batch))))
            run.report.encoded += len(batch)
            if progress is not None:
                progress(run.report.encoded, len(run.to_do))
    finally:
        run.finish()
    return run.report
