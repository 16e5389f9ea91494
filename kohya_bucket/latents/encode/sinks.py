"""Where encoded batches go: shards of a store, or sd-scripts' npz. Both run behind the encoder, on a thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kohya_bucket.files import remove_leftovers
from kohya_bucket.latents.architectures import Architecture
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.encode.comparison import Comparison, compare
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.latent_space import LatentSpace
from kohya_bucket.latents.npz.check import settle_npz
from kohya_bucket.latents.npz.convert_values import convert_values
from kohya_bucket.latents.npz.names import has_whole_name, paths_of_run
from kohya_bucket.latents.npz.read_write import NpzLatents, write_npz
from kohya_bucket.latents.stale import Reason
from kohya_bucket.latents.store.entries import Entry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter

if TYPE_CHECKING:
    import torch

__all__ = ["Finished", "NpzSink", "ShardSink", "Sink"]

OnDone = Callable[[Sequence[int]], None]


@dataclass
class Finished:
    """Encoded items of one batch: positions among the wanted ones, float32 latents on the CPU, masks."""

    items: list[int]
    plain: torch.Tensor
    flipped: torch.Tensor | None
    masks: list[npt.NDArray[np.uint8] | None]


class Sink(Protocol):
    """Takes batches; says through `on_done` which items are safe on disk."""

    def to_do(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of `items` that are not on disk as they should be, looked up anew."""

    def write(self, batch: Finished) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        """Wait for what is being written, and begin nothing more: after this no thread touches the folder."""


class ShardSink:
    """Writes into a `LatentStore`."""

    def __init__(
        self, root: Path, wanted: LatentItems, space: LatentSpace, images_root: Path, on_done: OnDone, **settings: Any
    ) -> None:
        self._wanted = wanted
        self._space = space
        self._texts = wanted.interpolations()
        self._position = {source: i for i, source in enumerate(wanted.sources)}
        self._on_done = on_done
        self.writer = StoreWriter(root, images_root=images_root, on_commit=self._committed, **settings)
        self.store = LatentStore(root)
        self._known = set(self.store.shards)
        self._lacking: npt.NDArray[np.bool_] | None = None

    def compare(self) -> Comparison:
        """All items against the store as it was when this sink was made."""
        comparison = compare(self.store, self._wanted)
        self._lacking = comparison.to_do
        return comparison

    def to_do(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        lacking = self.compare().to_do if self._lacking is None else self._lacking
        new = [name for name in self.store.layout.shard_sizes() if name not in self._known]
        self._known.update(new)
        if new:  # by this process or another; only these are read
            part = self.store.part(new)
            here = [self._position[s] for s in part.strings("source") if s in self._position]
            if here:
                lacking[here] &= compare(part, self._wanted.subset(here)).to_do
        return items[lacking[items]]

    def write(self, batch: Finished) -> None:
        dtype = self._wanted.encoding.dtype
        plain = _bits(batch.plain, dtype)
        flipped = None if batch.flipped is None else _bits(batch.flipped, dtype)
        for k, i in enumerate(batch.items):
            self.writer.add(
                self._wanted.entry(i, self._texts[i]), plain[k], flipped=None if flipped is None else flipped[k],
                mask=batch.masks[k], space=self._space,
            )  # fmt: skip

    def flush(self) -> None:
        self.writer.flush()

    def close(self) -> None:
        pass  # it writes on its caller's thread

    def _committed(self, entries: list[Entry]) -> None:
        self._on_done([self._position[entry.source] for entry in entries])


class NpzSink:
    """Writes sd-scripts' files: beside the images, or in the same folders under `root`.

    `paths` names them where the items are part of a run, see `paths_of_run`.
    """

    def __init__(
        self, root: Path | None, wanted: LatentItems, space: LatentSpace, arch: Architecture, images_root: Path,
        on_done: OnDone, *, paths: Sequence[Path] | None = None, threads: int = 4, sync: bool = True,
    ) -> None:  # fmt: skip
        self._wanted = wanted
        self._arch = arch
        self._space = space
        self._texts = wanted.interpolations()
        self._on_done = on_done
        self._sync = sync
        self.paths = paths_of_run([wanted], arch, root, images_root)[0] if paths is None else list(paths)
        self.shared = [i for i, image in enumerate(wanted.paths) if has_whole_name(self.paths[i], image)]
        remove_leftovers(self.paths)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kohya-bucket-npz")
        self._pending: list[Future[None]] = []

    def to_do(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        keep = [i for i in items.tolist() if self.reasons(i)]
        return np.array(keep, dtype=np.int64)

    def reasons(self, i: int) -> list[Reason]:
        """Why item `i` must be encoded; none if it is current. Then its file is as the reader asks for it, too."""
        entry = self._wanted.entry(i, self._texts[i])
        return settle_npz(self.paths[i], entry, self._arch, Path(self._wanted.paths[i]))[0]

    def write(self, batch: Finished) -> None:
        plain = self._values(batch.plain)
        flipped = None if batch.flipped is None else self._values(batch.flipped)
        for k, i in enumerate(batch.items):
            mask = batch.masks[k]
            self._pending.append(
                self._pool.submit(self._write_one, i, plain[k], None if flipped is None else flipped[k], mask)
            )
        self._pending = [future for future in self._pending if not _finished(future)]
        while len(self._pending) > 64:
            self._pending.pop(0).result()

    def flush(self) -> None:
        while self._pending:
            self._pending.pop(0).result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _write_one(
        self, i: int, plain: npt.NDArray[np.float32], flipped: npt.NDArray[np.float32] | None,
        mask: npt.NDArray[np.uint8] | None,
    ) -> None:  # fmt: skip
        entry = self._wanted.entry(i, self._texts[i])
        bucket = entry.fingerprint.bucket_size
        alpha = None
        if entry.fingerprint.mask:
            alpha = np.ones(bucket[::-1], np.float32) if mask is None else mask.astype(np.float32) / np.float32(255)
        self.paths[i].parent.mkdir(parents=True, exist_ok=True)
        item = NpzLatents(plain, entry.original_size, entry.crop_ltrb, flipped, alpha)
        name = os.path.basename(self._wanted.paths[i])
        write_npz(self.paths[i], item, bucket, self._arch, entry.fingerprint, source_name=name, sync=self._sync)
        self._on_done([i])

    def _values(self, latents: torch.Tensor) -> npt.NDArray[np.float32]:
        return convert_values(latents.numpy(), self._space, self._arch)


def _bits(latents: torch.Tensor, dtype: str) -> npt.NDArray[Any]:
    """Bits of float32 latents in storage type `dtype`, in its carrier type."""
    import torch

    latents = latents.to(getattr(torch, dtype)).contiguous()
    if dtype == "bfloat16":
        latents = latents.view(torch.int16)
    out: npt.NDArray[Any] = latents.numpy().view(carrier(dtype))
    return out


def _finished(future: Future[None]) -> bool:
    if future.done():
        future.result()
        return True
    return False
