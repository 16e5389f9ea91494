"""Maintenance of a store: pack it into few large shards or a copy elsewhere, and prune what is of no use.

Rows are copied into new shards first, and the old files go last. Whatever interrupts this, every item is in at least
one whole shard at any time. Shards that another process has open are left where the system refuses to remove them
(Windows), and named.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kohya_bucket.buckets.sizes import size_keys
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import TEMPORARY_AGE
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import REMEDY, Layout
from kohya_bucket.latents.store.state import temporary_files, verify, verify_files
from kohya_bucket.latents.store.storage import StorePath
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.texts import counted

_EXPECTED = 64  # items that object storage is asked for together


@dataclass
class MaintenanceReport:
    """What was done.

    Attributes:
        copied: items that were moved into new shards.
        dropped: items that are gone from the store.
        removed: files that were deleted.
        in_use: files that could not be removed, because a program holds them open.
        damaged: (item or file, what is wrong with it).
        freed: bytes.
    """

    copied: int = 0
    dropped: int = 0
    removed: list[str] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    freed: int = 0


def copy_items(store: LatentStore, items: Sequence[int], writer: StoreWriter) -> None:
    """Write items of `store` again, with their checksums looked at on the way and their numbers kept."""
    times = store.column("written_ns")
    for turn, i in enumerate(items):
        if turn % _EXPECTED == 0:
            store.expect(items[turn : turn + _EXPECTED])
        entry = store.entry(i)
        if store.info(i).arrays:
            kept = {name: replace(packed, bits=np.array(packed.bits)) for name, packed in store.packed(i).items()}
            writer.add_text(entry, kept, written_ns=int(times[i]))
            continue
        flip, mask = entry.fingerprint.flip, entry.fingerprint.mask
        flipped = np.array(store.read(i, flipped=True)) if flip else None
        alpha = store.read_mask(i) if mask else None
        writer.add(
            entry, np.array(store.read(i)), flipped=flipped, mask=None if alpha is None else np.array(alpha),
            space=store.info(i).space, written_ns=int(times[i]),
        )  # fmt: skip


def remove_shards(store: LatentStore, names: Sequence[str], done: MaintenanceReport) -> None:
    """Index what is there without `names`, then delete those."""
    store.release()
    for name in names:
        remove_file(store.layout.shards / name, done)
    store.refresh()
    write_manifest(store)
    store.refresh()


def remove_file(path: StorePath, done: MaintenanceReport) -> None:
    try:
        path.unlink()
        done.removed.append(path.name)
    except FileNotFoundError:
        pass
    except OSError:
        done.in_use.append(path.name)


def pack(
    store: LatentStore,
    target: str | os.PathLike[str] | None = None,
    *,
    shard_bytes: int = 256 << 20,
    cluster_by: str | None = None,
) -> MaintenanceReport:
    """Bring the items into as few shards as there need be, in order; in place or as a new store in `target`.

    A store in `target` is complete in itself: it can be carried elsewhere and trained from without the images.

    Args:
        cluster_by: "bucket" writes bucket after bucket, each in an order that mixes its sources: what is stored beside
            each other is trained at about the same time by order "local". All shards are written anew then.

    Raises:
        LatentStoreError: `target` holds a store already, or an item is damaged; or it is to be clustered, by something
            else or without being one of latents.
    """
    if cluster_by is not None and (cluster_by != "bucket" or not store.of_images):
        what = "outputs of text encoders have no bucket" if cluster_by == "bucket" else "only 'bucket' is known"
        raise LatentStoreError(f"cluster_by={cluster_by!r}: {what}")
    order = None if cluster_by is None else _mixed_within_buckets(store)
    if target is not None:
        return _packed_copy(store, target, shard_bytes, order)
    done = MaintenanceReport()
    small = [name for name, info in store.shards.items() if order is not None or info.nbytes < 0.7 * shard_bytes]
    chosen = set(small)
    before = sum(store.shards[name].nbytes for name in small)
    keep = [i for i in range(len(store)) if store.info(i).name in chosen]
    if _already_packed(store, small, keep) if order is None else _already_clustered(store, order, shard_bytes):
        write_manifest(store)
        return done
    with StoreWriter(store.layout.root, shard_bytes=shard_bytes, flush_seconds=None) as writer:
        _copy(store, [keep] if order is None else order, writer)
    done.copied = len(keep)
    remove_shards(store, small, done)
    done.freed = max(0, before - sum(info.nbytes for name, info in store.shards.items() if name not in chosen))
    return done


def _mixed_within_buckets(store: LatentStore) -> list[list[int]]:
    """The items of each bucket, in an order that looks random and stays the same when others are added."""
    digests = [hashlib.blake2b(str(source).encode("utf-8", "surrogateescape"), digest_size=8).digest()
               for source in store.strings("source")]  # fmt: skip
    mixed = np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)
    bucket = size_keys(store.bucket_sizes)
    collections = np.unique(np.array(store.strings("collection"), dtype=object).astype(str), return_inverse=True)[1]
    order = np.lexsort((mixed, bucket, collections))
    begins = np.flatnonzero((np.diff(bucket[order]) != 0) | (np.diff(collections[order]) != 0)) + 1
    return [items.tolist() for items in np.split(order, begins)]


def _copy(store: LatentStore, parts: Iterable[Sequence[int]], writer: StoreWriter) -> None:
    for items in parts:
        copy_items(store, items, writer)
        writer.flush()  # no bucket waits in memory for the end


def _already_clustered(store: LatentStore, order: list[list[int]], shard_bytes: int) -> bool:
    """Whether copying would give the same shards again: one after another in this order, all but the last full, and
    none longer than asked for."""
    if store.replaced_rows():
        return False
    shard = store.shard_numbers()
    runs = [shard[items][np.flatnonzero(np.diff(shard[items], prepend=-1))] for items in order]
    if sum(map(len, runs)) != len(store.shards):
        return False
    infos = [store.shards[name] for name in sorted(store.shards)]
    nbytes = [sum(spec.nbytes for spec in info.tensors.values()) for info in infos]
    if any(size - size // info.rows >= shard_bytes for size, info in zip(nbytes, infos, strict=True)):
        return False
    return all(nbytes[k] >= shard_bytes for run in runs for k in run[:-1].tolist())


def _packed_copy(
    store: LatentStore, target: str | os.PathLike[str], shard_bytes: int, order: list[list[int]] | None
) -> MaintenanceReport:
    if Layout(target).shard_sizes():
        raise LatentStoreError(f"{target} holds a latent store already: choose an empty folder")
    if damaged := sum(not name.endswith(".parquet") for name, _ in store.damage):
        raise LatentStoreError(
            f"{store.layout.root} has {counted(damaged, 'damaged shard')}, which a copy would not have: first {REMEDY}"
        )
    root = store.layout.images_root()
    with StoreWriter(target, images_root=root, shard_bytes=shard_bytes, flush_seconds=None) as out:
        _copy(store, [range(len(store))] if order is None else order, out)
    write_manifest(LatentStore(target))
    return MaintenanceReport(copied=len(store))


def _already_packed(store: LatentStore, small: Sequence[str], keep: Sequence[int]) -> bool:
    """Whether copying would give the same shards again: one small one per kind of row, without dead rows."""
    names = ["bucket_width", "bucket_height", "dtype", "kind", "flip", "mask", "collection", "shard"]
    found = store.table.take(np.array(keep, dtype=np.int64)).group_by(names, use_threads=False).aggregate([])
    kinds = set()
    for row in found.to_pylist():
        info = store.shards[row["shard"]]
        layouts = tuple((name, info.tensors[name].dtype, info.tensors[name].shape[1:]) for name in info.arrays)
        kinds.add((*list(row.values())[:-1], info.space, tuple(info.arrays.items()), layouts))
    rows = sum(store.shards[name].rows for name in small)
    return len(kinds) >= len(small) and rows == len(keep)


def prune(
    store: LatentStore, drop: Iterable[int] = (), *, damaged: bool = False, images_root: Path | None = None,
    dry_run: bool = False,
) -> MaintenanceReport:  # fmt: skip
    """Take out `drop` (positions), rows that newer ones replaced, and files of writers that died.

    Run it while nothing writes into the store.

    Args:
        damaged: read everything, and take out items and files that are not as they were written; what is whole in such
            a file is kept.
        images_root: where the images are, to be written where `store.json` does not say so any more.
    """
    done = MaintenanceReport()
    dropped = set(drop)
    bad_files: list[str] = []
    if damaged:
        files, items = verify_files(store), verify(store)
        sources = store.strings("source")
        done.damaged = [*files, *((sources[i], problem) for i, problem in items)]
        dropped |= {i for i, _ in items}
        bad_files = [name for name, _ in files]
    live: dict[str, list[int]] = {name: [] for name in store.shards}
    for i in range(len(store)):
        if i not in dropped:
            live[store.info(i).name].append(i)
    rows = {name: info.rows for name, info in store.shards.items()}
    loose = [name for name, items in live.items() if len(items) < rows[name] or name in bad_files]
    done.dropped = len(dropped)
    done.copied = sum(len(live[name]) for name in loose)
    done.freed = sum(int(store.shards[n].nbytes * (1 - len(live[n]) / max(1, rows[n]))) for n in loose)
    old: list[StorePath] = [
        Path(path) for path in temporary_files(store) if time.time() - os.path.getmtime(path) > TEMPORARY_AGE
    ]
    own = (store.layout.own_file(name) for name in set(bad_files) - set(loose))
    old += [path for path in own if path is not None]  # store.json is written anew, or stays
    if dry_run:
        done.removed = [*loose, *map(str, old)]
        return done
    if damaged and images_root is not None:
        if store.layout.store_file.name in bad_files:
            remove_file(store.layout.store_file, done)
        store.layout.create(images_root)
    with StoreWriter(store.layout.root) as writer:
        copy_items(store, [i for name in loose for i in live[name]], writer)
    store.release()
    for path in old:
        remove_file(path, done)
    remove_shards(store, loose, done)
    return done
