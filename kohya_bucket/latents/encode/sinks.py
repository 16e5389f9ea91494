"""Where encoded batches go: a store or sd-scripts' npz, on a thread, so that the encoder does not wait for the disk."""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.files import GroupedSync, make_folder, remove_leftovers
from kohya_bucket.latents.architectures import Architecture, LatentSpace
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.items import LatentItems, Wanted, compare
from kohya_bucket.latents.npz.check import settle_npz
from kohya_bucket.latents.npz.names import has_whole_name
from kohya_bucket.latents.npz.read_write import NpzLatents, convert_values, mask_values, write_npz
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.remote_path import StorePath
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.texts import counted

if TYPE_CHECKING:
    import torch


_MOST_BEHIND = 8
B = TypeVar("B")


@dataclass
class EncodedBatch:
    """Encoded items of one batch: positions among the wanted ones, float32 latents on the CPU, masks."""

    items: list[int]
    plain: torch.Tensor
    flipped: torch.Tensor | None
    masks: list[npt.NDArray[np.uint8] | None]


class Sink(Protocol):
    """Takes batches.

    Attributes:
        notes: what a user should know before anything is written.
    """

    notes: list[str]

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        """[N] bool: the items that are not on disk as they should be; and how many there are by reason."""

    def write(self, batch: EncodedBatch) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        """Wait for what is being written, and begin nothing more: after this no thread touches the folder."""

    def finish(self, wanted: Wanted) -> list[str]:
        """Called once at the end with the items of all processes; returns what a user should know."""


class Background:
    """Runs a sink on one thread, so that the encoder never waits for the disk until some batches are behind.

    After an error of the sink it is given nothing more, and the error is raised by the next call here.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink, self._failed = sink, False
        self._thread = ThreadPoolExecutor(1, "kohya-bucket-writer")
        self._behind: deque[Future[None]] = deque()

    def put(self, batch: EncodedBatch) -> None:
        while self._behind and (self._behind[0].done() or len(self._behind) == _MOST_BEHIND):
            self._behind.popleft().result()
        self._behind.append(self._thread.submit(self._write, batch))

    def close(self) -> None:
        """Finish what was given, or after an error what is being written, and end all threads."""
        try:
            while self._behind:
                self._behind.popleft().result()
            self._sink.flush()
        finally:
            self._thread.shutdown(cancel_futures=True)
            self._sink.close()

    def _write(self, batch: EncodedBatch) -> None:
        if not self._failed:
            self._failed = True  # unless this goes well
            self._sink.write(batch)
            self._failed = False


class ShardSink(Generic[B]):
    """Writes into a `LatentStore`.

    Args:
        wanted: this process' share of the items.
        add: adds a batch of them to a writer.
        options: of the `StoreWriter`.
    """

    def __init__(
        self, root: StorePath, wanted: Wanted, add: Callable[[StoreWriter, B], None], images_root: Path | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self._wanted, self._add = wanted, add
        self._writer = StoreWriter(root, images_root=images_root, **options)
        self.store = LatentStore(root)
        self.notes = list[str]()
        self._replaced, self._stale = self.store.replaced_rows(), 0

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        found = compare(self.store, self._wanted)
        self._stale = int((found.to_do & (found.at >= 0)).sum())
        return found.to_do, found.counts()

    def write(self, batch: B) -> None:
        self._add(self._writer, batch)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        pass  # it writes on its caller's thread

    def finish(self, wanted: Wanted) -> list[str]:
        """Index the store; captions that changed since, and hashes that were not asked for before, need no encoding."""
        self.store.refresh()
        write_manifest(self.store, wanted.with_newer_texts(self.store))
        # A run replaces the rows that it found stale. More of them: another run had the same items.
        twice = self.store.replaced_rows() - self._replaced - self._stale
        return [f"{counted(twice, 'item')} {_TWICE}"] if twice > 0 and len(wanted) == len(self._wanted) else []


_TWICE = (
    "were encoded twice, since another run wrote into the same store at the same time; nothing is damaged, and "
    "`kohya-bucket cache prune` frees the space. For several GPUs start once, by torchrun"
)


def add_batch(writer: StoreWriter, batch: EncodedBatch, wanted: LatentItems, space: LatentSpace) -> None:
    """Add the items of a batch to a store."""
    encoding = wanted.encoding
    writer.add_rows(
        wanted.rows(batch.items), _bits(batch.plain, encoding.dtype),
        flipped=None if batch.flipped is None else _bits(batch.flipped, encoding.dtype),
        masks=batch.masks if encoding.mask else None, space=space,
    )  # fmt: skip


def _bits(latents: torch.Tensor, dtype: str) -> npt.NDArray[Any]:
    import torch

    latents = latents.to(getattr(torch, dtype)).contiguous()
    if dtype == "bfloat16":
        latents = latents.view(torch.int16)
    out: npt.NDArray[Any] = latents.numpy().view(carrier(dtype))
    return out


class NpzSink:
    """Writes sd-scripts' files: beside the images, or in the same folders under `root`.

    Each file is there whole or not at all, also where the process is killed. Groups of them are waited for together. A
    power failure before may leave a file that is cut off, which is no npz: its directory is at the end. The next run,
    and sd-scripts, notice.

    Args:
        paths: the file of each item, see `paths_of_run`.
    """

    def __init__(
        self, paths: Sequence[Path], wanted: LatentItems, space: LatentSpace, arch: Architecture, *,
        sync: bool = True,
    ) -> None:  # fmt: skip
        self._wanted = wanted
        self._arch = arch
        self._space = space
        self._sync = sync
        self.paths = list(paths)
        self.notes = [
            f"{image}: another image of its folder has the same name and size, and sd-scripts would "
            f"let both use one file; its own is {path.name}, which sd-scripts finds with the "
            "kohya_bucket adapter only: rename the image to do without"
            for image, path in zip(wanted.paths, self.paths, strict=True)
            if has_whole_name(path, image)
        ]
        remove_leftovers(self.paths)
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="kohya-bucket-npz")
        self._groups = GroupedSync(self._pool)

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        items = enumerate(zip(self.paths, map(Path, self._wanted.paths), strict=True))
        found = [settle_npz(path, self._wanted.entry(i), self._arch, image)[0] for i, (path, image) in items]
        counts = Counter(str(reason) for reasons in found for reason in reasons)
        return np.array([bool(reasons) for reasons in found], dtype=bool), dict(counts)

    def write(self, batch: EncodedBatch) -> None:
        plain = self._values(batch.plain)
        flipped = [None] * len(plain) if batch.flipped is None else self._values(batch.flipped)
        for path in self._pool.map(self._write_one, batch.items, plain, flipped, batch.masks):
            if self._sync:
                self._groups.add(path)

    def flush(self) -> None:
        self._groups.finish()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def finish(self, wanted: Wanted) -> list[str]:
        return []  # each file stands for itself

    def _write_one(
        self, i: int, plain: npt.NDArray[np.float32], flipped: npt.NDArray[np.float32] | None,
        mask: npt.NDArray[np.uint8] | None,
    ) -> Path:  # fmt: skip
        entry, path = self._wanted.entry(i), self.paths[i]
        bucket = entry.fingerprint.bucket_size
        alpha = mask_values(mask, bucket) if entry.fingerprint.mask else None
        make_folder(path.parent)
        item = NpzLatents(plain, entry.original_size, entry.crop_ltrb, flipped, alpha)
        name = os.path.basename(self._wanted.paths[i])
        write_npz(path, item, bucket, self._arch, entry.fingerprint, source_name=name, sync=False)
        return path

    def _values(self, latents: torch.Tensor) -> npt.NDArray[np.float32]:
        return convert_values(latents.numpy(), self._space, self._arch)
