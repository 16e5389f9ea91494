"""Pack a store: few large shards in place of many small ones, or a copy that can be carried elsewhere."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import size_keys
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.maintenance.report import MaintenanceReport
from kohya_bucket.latents.maintenance.rewrite import copy_items, remove_shards, writer_like
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest

__all__ = ["pack"]


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
        LatentStoreError: `target` holds a store already, or an item is damaged or lost; or it is to be clustered, by
            something else or without being one of latents.
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
    with writer_like(store, store.layout.root, shard_bytes=shard_bytes, flush_seconds=None) as writer:
        _copy(store, keep, order, writer)
    done.copied = len(keep)
    remove_shards(store, small, done)
    done.freed = max(0, before - sum(info.nbytes for name, info in store.shards.items() if name not in chosen))
    return done


def _mixed_within_buckets(store: LatentStore) -> list[npt.NDArray[np.int64]]:
    """The items of each bucket, in an order that looks random and stays the same when others are added."""
    digests = [hashlib.blake2b(str(source).encode("utf-8", "surrogateescape"), digest_size=8).digest()
               for source in store.strings("source")]  # fmt: skip
    mixed = np.frombuffer(b"".join(digests), dtype=">u8").astype(np.uint64)
    bucket = size_keys(store.bucket_sizes)
    collections = np.unique(np.array(store.strings("collection"), dtype=object).astype(str), return_inverse=True)[1]
    order = np.lexsort((mixed, bucket, collections))
    begins = np.flatnonzero((np.diff(bucket[order]) != 0) | (np.diff(collections[order]) != 0)) + 1
    return np.split(order, begins)


def _copy(
    store: LatentStore, keep: Sequence[int], order: list[npt.NDArray[np.int64]] | None, writer: StoreWriter
) -> None:
    if order is None:
        copy_items(store, keep, writer)
        return
    for items in order:
        copy_items(store, items.tolist(), writer)
        writer.flush()  # no bucket waits in memory for the end


def _already_clustered(store: LatentStore, order: list[npt.NDArray[np.int64]], shard_bytes: int) -> bool:
    """Whether copying would give the same shards again: one after another in this order, all but the last full, and
    none longer than asked for."""
    if store.rows_on_disk() != len(store):
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
    store: LatentStore, target: str | os.PathLike[str], shard_bytes: int, order: list[npt.NDArray[np.int64]] | None
) -> MaintenanceReport:
    if Layout(target).shard_sizes():
        raise LatentStoreError(f"{target} holds a latent store already: choose an empty folder")
    if lost := len(store.lost_entries()) + sum(not name.endswith(".parquet") for name, _ in store.damage):
        raise LatentStoreError(
            f"{store.layout.root} has {lost} lost items or damaged shards, which the copy would not have: run "
            "`kohya-bucket cache repair` first; `cache prune` removes what cannot be repaired"
        )
    options: dict[str, Any] = {"images_root": store.images_root(), "shard_bytes": shard_bytes, "flush_seconds": None}
    with writer_like(store, target, **options) as out:
        _copy(store, range(len(store)), order, out)
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
