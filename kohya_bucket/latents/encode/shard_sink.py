"""Encoded batches into a store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.latents.encode.sinks import EncodedBatch, OnDone
from kohya_bucket.latents.items import LatentItems, compare
from kohya_bucket.latents.latent_space import LatentSpace, carrier
from kohya_bucket.latents.remote.remote_path import Place
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest

if TYPE_CHECKING:
    import torch

__all__ = ["ShardSink", "add_batch"]


class ShardSink:
    """Writes into a `LatentStore`."""

    def __init__(
        self, root: Place, wanted: LatentItems, space: LatentSpace, images_root: Path, on_done: OnDone,
        *, shard_bytes: int, flush_seconds: float | None,
    ) -> None:  # fmt: skip
        self._wanted = wanted
        self._space = space
        self._texts = wanted.interpolations()
        self._position = {source: i for i, source in enumerate(wanted.sources)}
        self._on_done = on_done
        self.writer = StoreWriter(root, images_root=images_root, shard_bytes=shard_bytes, flush_seconds=flush_seconds,
                                  on_commit=self._committed)  # fmt: skip
        self.store = LatentStore(root)
        self.work, self.notes = self.store.layout.work, list[str]()
        self._known = set(self.store.shards)
        self._lacking: npt.NDArray[np.bool_] | None = None

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        comparison = compare(self.store, self._wanted)
        self._lacking = comparison.to_do
        return comparison.to_do, comparison.counts()

    def to_do(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        if self._lacking is None:
            self._lacking = compare(self.store, self._wanted).to_do
        new = [name for name in self.store.layout.shard_sizes() if name not in self._known]
        self._known.update(new)
        if new:  # by this process or another; only these are read
            part = self.store.part(new)
            here = [self._position[s] for s in part.strings("source") if s in self._position]
            if here:
                self._lacking[here] &= compare(part, self._wanted.subset(here)).to_do
        return items[self._lacking[items]]

    def write(self, batch: EncodedBatch) -> None:
        add_batch(self.writer, batch, self._wanted, self._texts, self._space)

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        pass  # it writes on its caller's thread

    def _committed(self, entries: list[StoreEntry]) -> None:
        self._on_done([self._position[entry.source] for entry in entries])

    def finish(self) -> None:
        """Index the store; captions that changed since, and hashes that were not asked for before, need no encoding."""
        store, wanted = self.store, self._wanted
        store.refresh()
        at = store.find(wanted.sources, wanted.encoding.collection)
        here = np.flatnonzero(at >= 0)
        rows = at[here]
        captions = _changed_texts(store, "caption", rows, [wanted.captions[i] for i in here])
        hashes: dict[int, str | None] = {}
        if wanted.source_hashes is not None:
            same = store.column("source_bytes")[rows] == wanted.source_bytes[here]
            same &= store.column("source_mtime_ns")[rows] == wanted.source_mtime_ns[here]
            hashes = _changed_texts(store, "source_hash", rows[same], [wanted.source_hashes[i] for i in here[same]])
        table = store.with_texts(caption=captions, source_hash=hashes) if captions or hashes else None
        write_manifest(store, table)


def _changed_texts(
    store: LatentStore, name: str, rows: npt.NDArray[np.int64], texts: Sequence[str | None]
) -> dict[int, str | None]:
    stored = store.table[name].take(rows).to_pylist() if len(rows) else []
    return {int(row): new for row, new, old in zip(rows, texts, stored, strict=True) if new != old}


def add_batch(
    writer: StoreWriter, batch: EncodedBatch, wanted: LatentItems, texts: npt.NDArray[Any], space: LatentSpace
) -> None:
    """Add the items of a batch to a store; `texts` are the wanted items' `interpolations`."""
    dtype = wanted.encoding.dtype
    plain = _bits(batch.plain, dtype)
    flipped = None if batch.flipped is None else _bits(batch.flipped, dtype)
    for k, i in enumerate(batch.items):
        writer.add(
            wanted.entry(i, texts[i]), plain[k], flipped=None if flipped is None else flipped[k],
            mask=batch.masks[k], space=space,
        )  # fmt: skip


def _bits(latents: torch.Tensor, dtype: str) -> npt.NDArray[Any]:
    """Bits of float32 latents in storage type `dtype`, in its carrier type."""
    import torch

    latents = latents.to(getattr(torch, dtype)).contiguous()
    if dtype == "bfloat16":
        latents = latents.view(torch.int16)
    out: npt.NDArray[Any] = latents.numpy().view(carrier(dtype))
    return out
