"""Rows are copied into new shards first, and the old files go last.

Whatever interrupts this, every item is in at least one whole shard at any time. Shards that another process has
open are left where the system refuses to remove them (Windows), and named.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kohya_bucket.latents.maintenance.report import MaintenanceReport
from kohya_bucket.latents.remote.remote_path import Place, move
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.latents.text.text_store import TextStore
from kohya_bucket.latents.text.text_writer import TextWriter

__all__ = ["copy_items", "quarantine", "remove_file", "remove_shards", "writer_like"]


def copy_items(store: LatentStore, items: Iterable[int], writer: StoreWriter) -> None:
    """Write items of `store` again, with their checksums looked at on the way and their numbers kept."""
    times = store.column("written_ns")
    mine, theirs = itertools.tee(items)
    for i, entry in zip(_expected(store, mine), store.entries(theirs), strict=True):
        if isinstance(store, TextStore) and isinstance(writer, TextWriter) and store.info(i).arrays:
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


def _expected(store: LatentStore, items: Iterable[int]) -> Iterator[int]:
    """`items`; where they lie in object storage, some are asked for together."""
    if not store.is_remote:
        yield from items
        return
    left = iter(items)
    while part := list(itertools.islice(left, 64)):
        store.expect(part)
        yield from part


def writer_like(store: LatentStore, root: str | os.PathLike[str], **options: Any) -> StoreWriter:
    """A writer for items of the kind that `store` holds; options as for `StoreWriter`."""
    return (TextWriter if isinstance(store, TextStore) else StoreWriter)(root, **options)


def remove_shards(
    store: LatentStore, names: Sequence[str], done: MaintenanceReport, *, forget_lost: bool = False
) -> None:
    """Index what is there without `names`, then delete those."""
    store.release()
    for name in names:
        remove_file(store.layout.shards / name, done)
    store.refresh()
    write_manifest(store, forget_lost=forget_lost)
    store.refresh()


def remove_file(path: Place, done: MaintenanceReport) -> None:
    try:
        path.unlink()
        done.removed.append(path.name)
    except FileNotFoundError:
        pass
    except OSError:
        done.in_use.append(path.name)


def quarantine(store: LatentStore, name: str, done: MaintenanceReport) -> None:
    source = (store.layout.shards if name.endswith(".safetensors") else store.layout.root) / name
    store.release()
    try:
        store.layout.quarantine.mkdir(exist_ok=True)
        move(source, store.layout.quarantine / name)
        done.removed.append(name)
    except FileNotFoundError:
        pass
    except OSError:
        done.in_use.append(name)
