"""Where encoded batches go: a store or sd-scripts' npz, on a thread, so that the encoder does not wait for the disk."""

from __future__ import annotations

import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from kohya_bucket.files import GroupedSync, make_folder, remove_leftovers
from kohya_bucket.latents.architectures import Architecture, LatentSpace
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.fingerprint import Reason
from kohya_bucket.latents.items import LatentItems, compare
from kohya_bucket.latents.npz.check import settle_npz
from kohya_bucket.latents.npz.names import has_whole_name, paths_of_run
from kohya_bucket.latents.npz.read_write import NpzLatents, convert_values, mask_values, write_npz
from kohya_bucket.latents.remote.remote_path import Place
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest

if TYPE_CHECKING:
    import torch


__all__ = ["Background", "EncodedBatch", "NpzSink", "ShardSink", "Sink", "add_batch"]

OnDone = Callable[[Sequence[int]], None]


@dataclass
class EncodedBatch:
    """Encoded items of one batch: positions among the wanted ones, float32 latents on the CPU, masks."""

    items: list[int]
    plain: torch.Tensor
    flipped: torch.Tensor | None
    masks: list[npt.NDArray[np.uint8] | None]


class Sink(Protocol):
    """Takes batches; says through an `OnDone` which items are safe on disk.

    Attributes:
        notes: what a user should know before anything is written.
    """

    notes: list[str]

    @property
    def work(self) -> Place:
        """Folder in which the processes that write there share their work."""

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        """[N] bool: the items that are not on disk as they should be; and how many there are by reason."""

    def to_do(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of `items` that are not on disk as they should be, looked up anew."""

    def write(self, batch: EncodedBatch) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        """Wait for what is being written, and begin nothing more: after this no thread touches the folder."""

    def finish(self) -> None:
        """Called once after all items are there, or never will be."""


class Background:
    """Runs a sink on one thread, so that the encoder never waits for the disk until `depth` batches are behind.

    An error of the sink is raised by the next call here.
    """

    def __init__(self, sink: Sink, depth: int = 8) -> None:
        self._sink = sink
        self._queue: queue.Queue[EncodedBatch | None] = queue.Queue(depth)
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kohya-bucket-writer", daemon=True)
        self._thread.start()

    def put(self, batch: EncodedBatch) -> None:
        self._raise()
        self._queue.put(batch)

    def drain(self) -> None:
        """Wait until everything given so far is safe on disk."""
        self._queue.join()
        self._flush()

    def _flush(self) -> None:
        self._raise()
        try:
            self._sink.flush()
        except BaseException as error:
            self._problem = error  # so that nothing more is begun
            raise

    def close(self) -> None:
        """Finish what was given, or after an error what is being written, and end all threads.

        Errors that nobody saw yet are raised.
        """
        try:
            self._queue.put(None)
            self._thread.join()
            self._flush()
        finally:
            self._sink.close()

    def _run(self) -> None:
        while True:
            batch = self._queue.get()
            try:
                if batch is None:
                    return
                if self._problem is None:
                    self._sink.write(batch)
            except BaseException as error:
                self._problem = error
            finally:
                self._queue.task_done()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem


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


_GROUP = 64


class NpzSink:
    """Writes sd-scripts' files: beside the images, or in the same folders under `root`.

    Each file is there whole or not at all, also where the process is killed. Items are said to be done when their files
    are on disk; for that, groups of them are waited for together. A power failure before may leave a file that is cut
    off, which is no npz: its directory is at the end. The next run, and sd-scripts, notice.

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
        self.work = (root or images_root) / ".kohya_bucket_work"
        self.notes = [
            f"{image}: another image of its folder has the same name and size, and sd-scripts would "
            f"let both use one file; its own is {path.name}, which sd-scripts finds with the "
            "kohya_bucket adapter only: rename the image to do without"
            for image, path in zip(wanted.paths, self.paths, strict=True)
            if has_whole_name(path, image)
        ]
        remove_leftovers(self.paths)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kohya-bucket-npz")
        self._pending: list[Future[int]] = []
        self._groups = GroupedSync(self._pool, on_done, _GROUP)

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        reasons = [[str(reason) for reason in self.reasons(i)] for i in range(len(self._wanted))]
        counts = Counter(text for texts in reasons for text in texts)
        return np.array([bool(texts) for texts in reasons], dtype=bool), dict(counts)

    def to_do(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        keep = [i for i in items.tolist() if self.reasons(i)]
        return np.array(keep, dtype=np.int64)

    def reasons(self, i: int) -> list[Reason]:
        """Why item `i` must be encoded; none if it is current. Then its file is as the reader asks for it, too."""
        entry = self._wanted.entry(i, self._texts[i])
        return settle_npz(self.paths[i], entry, self._arch, Path(self._wanted.paths[i]))[0]

    def write(self, batch: EncodedBatch) -> None:
        plain = self._values(batch.plain)
        flipped = None if batch.flipped is None else self._values(batch.flipped)
        for k, i in enumerate(batch.items):
            mask = batch.masks[k]
            self._pending.append(
                self._pool.submit(self._write_one, i, plain[k], None if flipped is None else flipped[k], mask)
            )
        while self._pending and (self._pending[0].done() or len(self._pending) > _GROUP):
            self._written(self._pending.pop(0).result())

    def flush(self) -> None:
        while self._pending:
            self._written(self._pending.pop(0).result())
        self._groups.finish()

    def _written(self, i: int) -> None:
        if self._sync:
            self._groups.add(self.paths[i], i)
        else:
            self._on_done([i])

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def finish(self) -> None:
        pass  # each file stands for itself

    def _write_one(
        self, i: int, plain: npt.NDArray[np.float32], flipped: npt.NDArray[np.float32] | None,
        mask: npt.NDArray[np.uint8] | None,
    ) -> int:  # fmt: skip
        entry = self._wanted.entry(i, self._texts[i])
        bucket = entry.fingerprint.bucket_size
        alpha = mask_values(mask, bucket) if entry.fingerprint.mask else None
        make_folder(self.paths[i].parent)
        item = NpzLatents(plain, entry.original_size, entry.crop_ltrb, flipped, alpha)
        name = os.path.basename(self._wanted.paths[i])
        write_npz(self.paths[i], item, bucket, self._arch, entry.fingerprint, source_name=name, sync=False)
        return i

    def _values(self, latents: torch.Tensor) -> npt.NDArray[np.float32]:
        return convert_values(latents.numpy(), self._space, self._arch)
