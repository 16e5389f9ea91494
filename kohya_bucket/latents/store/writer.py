"""Writing into a store: rows gather per bucket, a full shard goes to disk as one file under a name of its own.

Any number of writers, in any number of processes and machines, need no lock: none ever touches a file of another.
"""

from __future__ import annotations

import os
import time
import zlib
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.architectures import LatentSpace
from kohya_bucket.latents.remote.remote_path import Place, write_new
from kohya_bucket.latents.store.contents import Assigned, Generations
from kohya_bucket.latents.store.entries import StoreEntry, check_rows, encode, to_table
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.shards import ShardInfo, TensorSpec, write_shard

__all__ = ["Pending", "StoreWriter", "write_manifest"]

Bits = npt.NDArray[Any]
P = TypeVar("P", bound="Pending")


class _Kind(NamedTuple):
    """What the rows of one shard have in common."""

    bucket_size: tuple[int, int]
    dtype: str
    kind: str
    flip: bool
    mask: bool
    shape: tuple[int, ...]
    space: LatentSpace
    collection: str


@dataclass
class Pending:
    """Items that wait to be written as one shard."""

    entries: list[StoreEntry] = field(default_factory=list)
    numbers: list[int | None] = field(default_factory=list)  # as given
    turns: list[int] = field(default_factory=list)
    nbytes: int = 0


@dataclass
class _Latents(Pending):
    plain: list[Bits] = field(default_factory=list)
    flipped: list[Bits] = field(default_factory=list)
    masks: list[Bits] = field(default_factory=list)
    mask_rows: list[int] = field(default_factory=list)


class StoreWriter:
    """Adds items to a store. Use as a context manager; leaving it commits what is pending.

    Args:
        root: the store's folder, made if missing.
        images_root: folder that the sources' paths start from; remembered when the store is made.
        shard_bytes: a shard is committed when its tensors reach this size.
        flush_seconds: everything pending is committed when this long has passed, so that a crash loses
            little; None waits for full shards.
        assigned: numbers and names that somebody else hands out; None: this writer takes its own.

    Raises:
        LatentStoreError: the folder cannot be written, or the disk is full. What was committed stays.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        images_root: Path | None = None,
        shard_bytes: int = 256 << 20,
        flush_seconds: float | None = 60.0,
        assigned: Assigned | None = None,
    ) -> None:
        self.layout = Layout(root)
        self.layout.create(images_root)
        self._shard_bytes = shard_bytes
        self._flush_seconds = flush_seconds
        self._pending: dict[Any, Any] = {}  # `Pending` by what its items have in common
        self._generations = assigned or Generations(self.layout)
        self._added = 0
        self._flushed = time.monotonic()

    def add(
        self,
        entry: StoreEntry,
        plain: Bits,
        *,
        flipped: Bits | None = None,
        mask: npt.NDArray[np.uint8] | None = None,
        space: LatentSpace,
        written_ns: int | None = None,
    ) -> None:
        """Add one item.

        Args:
            entry: what it is; its fingerprint says dtype, kind, flip and mask.
            plain: [C, h, w] latents or [2, C, h, w] mean and standard deviation, in the dtype's carrier type.
            flipped: the same of the mirrored image.
            mask: [H, W] alpha channel of the bucket's pixels; None where the image is opaque.
            space: what the numbers mean.
            written_ns: the number that decides between two items of one key, see `Generations`; None: one above all
                that are in the store when this is committed.
        """
        print_ = entry.fingerprint
        if print_.flip != (flipped is not None):
            raise ValueError(f"{entry.source}: its fingerprint says flip={print_.flip}")
        key = _Kind(print_.bucket_size, print_.dtype, print_.kind, print_.flip, print_.mask, plain.shape, space,
                    entry.collection)  # fmt: skip
        pending = self._enter(key, _Latents, entry, written_ns)
        pending.plain.append(plain)
        pending.nbytes += plain.nbytes
        if flipped is not None:
            pending.flipped.append(flipped)
            pending.nbytes += flipped.nbytes
        pending.mask_rows.append(-2 if not print_.mask else -1 if mask is None else len(pending.masks))
        if print_.mask and mask is not None:
            pending.masks.append(mask)
            pending.nbytes += mask.nbytes
        self._commit_full(key)

    def _enter(self, key: Any, kind: type[P], entry: StoreEntry, written_ns: int | None) -> P:
        """Where an item waits, its row begun."""
        pending: P = self._pending.setdefault(key, kind())
        self._added += 1
        pending.entries.append(entry)
        pending.numbers.append(written_ns)
        pending.turns.append(self._added)
        return pending

    def _commit_full(self, key: Any) -> None:
        """Commit what is large or old enough, after an item was added to `key`."""
        if self._pending[key].nbytes >= self._shard_bytes:
            self._commit(key, self._generations.greatest())
        elif self._flush_seconds is not None and time.monotonic() - self._flushed > self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Commit everything that is pending."""
        above = self._generations.greatest() if self._pending else 0
        for key in list(self._pending):
            self._commit(key, above)
        self._flushed = time.monotonic()

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()
            return
        with suppress(LatentStoreError):  # what is finished is kept; the first error is the one to report
            self.flush()

    def _commit(self, common: Any, above: int) -> None:
        rows: _Latents = self._pending.pop(common)
        bucket_size, dtype, kind = common.bucket_size, common.dtype, common.kind
        tensors: dict[str, tuple[str, Bits]] = {kind: (dtype, np.stack(rows.plain))}
        if rows.flipped:
            tensors[f"{kind}_flipped"] = (dtype, np.stack(rows.flipped))
        if rows.masks:
            tensors["alpha_mask"] = ("uint8", np.stack(rows.masks))
        n = len(rows.entries)
        places = {
            "mask_row": rows.mask_rows, "crc_plain": _checksums(tensors[kind][1], n),
            "crc_flipped": _checksums(tensors[f"{kind}_flipped"][1], n) if rows.flipped else [0] * n,
            "crc_mask": [zlib.crc32(np.ascontiguousarray(rows.masks[m]).data) if m >= 0 else 0 for m in rows.mask_rows],
        }  # fmt: skip
        path = self.layout.new_shard(bucket_size, dtype, self._generations.tag())
        self._write(path, rows, above, places, tensors, common.space, {"bucket": f"{bucket_size[0]}x{bucket_size[1]}"})

    def _write(
        self, path: Place, rows: Pending, above: int, places: dict[str, list[Any]],
        tensors: dict[str, tuple[str, Bits]], space: LatentSpace, metadata: dict[str, str],
        arrays: dict[str, tuple[str, int]] | None = None,
    ) -> None:  # fmt: skip
        """One shard, whole: `places` as for `to_table`, but for what follows from `above` and where the rows lie."""
        self._generations.is_mine(path.name)
        n = len(rows.entries)
        numbers = [
            above + turn if given is None else given for given, turn in zip(rows.numbers, rows.turns, strict=True)
        ]
        places = places | {"written_ns": numbers, "shard": [path.name] * n, "row": list(range(n))}
        table = to_table(rows.entries, places)
        specs = {name: TensorSpec(dtype, bits.shape, 0) for name, (dtype, bits) in tensors.items()}
        nbytes = sum(spec.nbytes for spec in specs.values())
        # or else no reader would take it
        check_rows(table, {path.name: ShardInfo(path.name, nbytes, specs, space, arrays or {}).checked()})
        description: dict[str, Any] = {
            "tensors": {name: [spec.dtype, list(spec.shape)] for name, spec in specs.items()}, "space": vars(space),
        }  # fmt: skip
        if arrays:
            description["arrays"] = arrays
        write_shard(path, tensors, encode(table, description), {"format": "kohya_bucket.latents"} | metadata)


def _checksums(bits: Bits, n: int) -> list[int]:
    return [zlib.crc32(bits[i].data) for i in range(n)]


def write_manifest(store: LatentStore, table: Any = None) -> Place | None:
    """Index all shards of an open store in one new manifest, and remove those it replaces.

    Args:
        table: the rows to index instead of the store's own, e.g. with other captions.

    Returns the manifest, or None if the newest one says the same already. Raises as `write_new` does.
    """
    older = store.layout.manifests()
    if table is None and store.indexed and not store.damage and len(older) == 1:
        return None
    description = {"shards": [info.to_json() for info in store.shards.values()], "in_order": True}
    data = encode(store.table if table is None else table, description)
    path = store.layout.new_manifest(data)
    write_new(path, [data])
    for old in older:
        with suppress(OSError):
            old.unlink()
    return path
