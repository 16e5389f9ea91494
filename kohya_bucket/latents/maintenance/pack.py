"""Pack a store: few large shards in place of many small ones, or a copy that can be carried elsewhere."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.maintenance.report import MaintenanceReport
from kohya_bucket.latents.maintenance.rewrite import copy_items, remove_shards, writer_like
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import write_manifest

__all__ = ["pack"]


def pack(
    store: LatentStore, target: str | os.PathLike[str] | None = None, *, shard_bytes: int = 256 << 20
) -> MaintenanceReport:
    """Bring the items into as few shards as there need be, in order; in place or as a new store in `target`.

    A store in `target` is complete in itself: it can be carried elsewhere and trained from without the images.

    Raises:
        LatentStoreError: `target` holds a store already, or an item is damaged or lost.
    """
    if target is not None:
        return _packed_copy(store, target, shard_bytes)
    done = MaintenanceReport()
    small = [name for name, info in store.shards.items() if info.nbytes < 0.7 * shard_bytes]
    chosen = set(small)
    before = sum(store.shards[name].nbytes for name in small)
    keep = [i for i in range(len(store)) if store.info(i).name in chosen]
    if _already_packed(store, small, keep):
        write_manifest(store)
        return done
    with writer_like(store, store.layout.root, shard_bytes=shard_bytes, flush_seconds=None) as writer:
        copy_items(store, keep, writer)
    done.copied = len(keep)
    remove_shards(store, small, done)
    done.freed = max(0, before - sum(info.nbytes for name, info in store.shards.items() if name not in chosen))
    return done


def _packed_copy(store: LatentStore, target: str | os.PathLike[str], shard_bytes: int) -> MaintenanceReport:
    if any(Path(target).glob("shards/*.safetensors")):
        raise LatentStoreError(f"{target} holds a latent store already: choose an empty folder")
    if lost := len(store.lost_entries()) + sum(not name.endswith(".parquet") for name, _ in store.damage):
        raise LatentStoreError(
            f"{store.layout.root} has {lost} lost items or damaged shards, which the copy would not have: run "
            "`kohya-bucket cache repair` first; `cache prune` removes what cannot be repaired"
        )
    options: dict[str, Any] = {"images_root": store.images_root(), "shard_bytes": shard_bytes, "flush_seconds": None}
    with writer_like(store, target, **options) as out:
        copy_items(store, range(len(store)), out)
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
