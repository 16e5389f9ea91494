"""Repair, prune and pack: rows are copied into new shards first, and the old files go last.

Whatever interrupts this, every item is in at least one whole shard at any time. Shards that another process has
open are left where the system refuses to remove them (Windows), and named.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import TEMPORARY_AGE
from kohya_bucket.latents.encode.precompute import PrecomputeReport, encode_items
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.source_files import hash_files, stat_files
from kohya_bucket.latents.store.entries import Entry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.state import temporary_files, verify
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest
from kohya_bucket.latents.vae.encoder import encoder_hash

if TYPE_CHECKING:
    from kohya_bucket.latents.vae.encoder import VAEEncoder

__all__ = ["MaintenanceReport", "pack", "prune", "repair"]


@dataclass
class MaintenanceReport:
    """What was done.

    Attributes:
        copied: items that were moved into new shards.
        dropped: items that are gone from the store.
        removed: files that were deleted or put into quarantine.
        in_use: files that could not be removed, because a program holds them open.
        damaged: (item or file, what was wrong with it).
        missing: sources of items that are lost and were not encoded again.
        encoded: reports of what was encoded again.
        freed: bytes.
    """

    copied: int = 0
    dropped: int = 0
    removed: list[str] = field(default_factory=list)
    in_use: list[str] = field(default_factory=list)
    damaged: list[tuple[str, str]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    encoded: list[PrecomputeReport] = field(default_factory=list)
    freed: int = 0


def repair(
    store: LatentStore, encoder: VAEEncoder | None = None, *, images_root: Path | None = None, **settings: Any
) -> MaintenanceReport:
    """Put damaged shards into quarantine, keep their healthy items, and encode the others again.

    Args:
        encoder: encodes what is lost, if its weights are those of the lost items; None only names them.
        images_root: where the images are, if not where the store says.
        settings: see `encode_items`.
    """
    done = MaintenanceReport(damaged=list(store.damage))
    if images_root is not None:
        store.layout.create(images_root)  # where `store.json` is lost
    bad = verify(store)
    sources = store.strings("source")
    done.damaged += [(sources[i], problem) for i, problem in bad]
    lost = [*store.lost_entries(), *(store.entry(i) for i, _ in bad)]
    sick = {store.info(i).name for i, _ in bad}
    if sick:
        broken = {i for i, _ in bad}
        keep = [i for i in range(len(store)) if store.info(i).name in sick and i not in broken]
        with StoreWriter(store.layout.root) as writer:
            _copy(store, keep, writer)
        done.copied = len(keep)
    for name, _ in store.damage:
        _quarantine(store, name, done)
    if sick and not store.indexed:
        write_manifest(store)  # so that the lost rows stay known
    for name in sick:
        _quarantine(store, name, done)
    store.refresh()
    if done.damaged:
        write_manifest(store)
    if encoder is not None:
        _encode_again(store, lost, encoder, images_root or store.images_root(), done, settings)
    else:
        done.missing = [entry.source for entry in lost]
    store.refresh()
    return done


def prune(
    store: LatentStore, drop: Iterable[int] = (), *, quarantine: bool = False, dry_run: bool = False
) -> MaintenanceReport:
    """Take out `drop` (positions), rows that newer ones replaced, and files of writers that died.

    Items that `repair` could not bring back are forgotten, unless a damaged shard still waits for it.
    Run it while nothing writes into the store.
    """
    done = MaintenanceReport()
    dropped = set(drop)
    live: dict[str, list[int]] = {name: [] for name in store.shards}
    for i in range(len(store)):
        if i not in dropped:
            live[store.info(i).name].append(i)
    rows = {name: next(iter(info.tensors.values())).shape[0] for name, info in store.shards.items()}
    loose = [name for name, items in live.items() if len(items) < rows[name]]
    done.dropped = len(dropped)
    done.copied = sum(len(live[name]) for name in loose)
    done.freed = sum(int(store.shards[n].nbytes * (1 - len(live[n]) / max(1, rows[n]))) for n in loose)
    old = [path for path in temporary_files(store) if time.time() - os.path.getmtime(path) > TEMPORARY_AGE]
    if quarantine and store.layout.quarantine.is_dir():
        old += [str(path) for path in store.layout.quarantine.iterdir()]
    if dry_run:
        done.removed = [*loose, *old]
        return done
    with StoreWriter(store.layout.root) as writer:
        _copy(store, [i for name in loose for i in live[name]], writer)
    _remove_shards(store, loose, done, forget_lost=not store.damage)
    for path in old:
        _remove(Path(path), done)
    return done


def pack(
    store: LatentStore, target: str | os.PathLike[str] | None = None, *, shard_bytes: int = 256 << 20
) -> MaintenanceReport:
    """Bring the items into as few shards as there need be, in order; in place or as a new store in `target`.

    A store in `target` is complete in itself: it can be carried elsewhere and trained from without the images.

    Raises:
        LatentStoreError: `target` holds a store already, or an item is damaged or lost.
    """
    done = MaintenanceReport()
    if target is not None:
        if any(Path(target).glob("shards/*.safetensors")):
            raise LatentStoreError(f"{target} holds a latent store already: choose an empty folder")
        if lost := len(store.lost_entries()) + sum(not name.endswith(".parquet") for name, _ in store.damage):
            raise LatentStoreError(
                f"{store.layout.root} has {lost} lost items or damaged shards, which the copy would lack: run "
                "`kohya-bucket cache repair` first; `cache prune` forgets what cannot be brought back"
            )
        with StoreWriter(target, images_root=store.images_root(), shard_bytes=shard_bytes, flush_seconds=None) as out:
            _copy(store, range(len(store)), out)
        write_manifest(LatentStore(target))
        done.copied = len(store)
        return done
    small = [name for name, info in store.shards.items() if info.nbytes < 0.7 * shard_bytes]
    chosen = set(small)
    before = sum(store.shards[name].nbytes for name in small)
    keep = [i for i in range(len(store)) if store.info(i).name in chosen]
    if _already_packed(store, small, keep, shard_bytes):
        write_manifest(store)
        return done
    with StoreWriter(store.layout.root, shard_bytes=shard_bytes, flush_seconds=None) as writer:
        _copy(store, keep, writer)
    done.copied = len(keep)
    _remove_shards(store, small, done)
    done.freed = before - sum(i.nbytes for n, i in store.shards.items() if n not in chosen) if small else 0
    done.freed = max(0, done.freed)
    return done


def _already_packed(store: LatentStore, small: Sequence[str], keep: Sequence[int], shard_bytes: int) -> bool:
    """Whether copying would give the same shards again: one small one per kind of row, without dead rows."""
    kinds = set()
    for i in keep:
        entry = store.entry(i).fingerprint
        kinds.add((entry.bucket_size, entry.dtype, entry.kind, entry.flip, entry.mask, store.info(i).space,
                   store.table["collection"][i].as_py()))  # fmt: skip
    rows = sum(next(iter(store.shards[name].tensors.values())).shape[0] for name in small)
    return len(kinds) >= len(small) and rows == len(keep) and shard_bytes > 0


def _copy(store: LatentStore, items: Iterable[int], writer: StoreWriter) -> None:
    """Write items of `store` again, with their checksums looked at on the way and their times kept."""
    times = store.column("written_ns")
    for i in items:
        entry = store.entry(i)
        flip, mask = entry.fingerprint.flip, entry.fingerprint.mask
        flipped = np.array(store.read(i, flipped=True)) if flip else None
        alpha = store.read_mask(i) if mask else None
        writer.add(
            entry, np.array(store.read(i)), flipped=flipped, mask=None if alpha is None else np.array(alpha),
            space=store.info(i).space, written_ns=int(times[i]),
        )  # fmt: skip


def _remove_shards(
    store: LatentStore, names: Sequence[str], done: MaintenanceReport, *, forget_lost: bool = False
) -> None:
    """Index what is there without `names`, then delete those."""
    store.release()
    for name in names:
        _remove(store.layout.shards / name, done)
    store.refresh()
    write_manifest(store, forget_lost=forget_lost)
    store.refresh()


def _remove(path: Path, done: MaintenanceReport) -> None:
    try:
        path.unlink()
        done.removed.append(path.name)
    except FileNotFoundError:
        pass
    except OSError:
        done.in_use.append(path.name)


def _quarantine(store: LatentStore, name: str, done: MaintenanceReport) -> None:
    source = (store.layout.root if name.endswith(".parquet") else store.layout.shards) / name
    store.release()
    try:
        store.layout.quarantine.mkdir(exist_ok=True)
        os.replace(source, store.layout.quarantine / name)
        done.removed.append(name)
    except FileNotFoundError:
        pass
    except OSError:
        done.in_use.append(name)


def _encode_again(
    store: LatentStore,
    lost: list[Entry],
    encoder: VAEEncoder,
    images_root: Path,
    done: MaintenanceReport,
    settings: dict[str, Any],
) -> None:
    vae = encoder_hash(encoder)
    groups: dict[EncodeOptions, list[Entry]] = {}
    for entry in lost:
        p = entry.fingerprint
        if p.vae != vae:
            done.missing.append(entry.source)
            continue
        name = p.interpolation.partition("/")[0]
        encoding = EncodeOptions(
            p.vae, p.dtype, p.kind, p.flip, p.mask, "auto" if name == "none" else name, entry.collection
        )
        groups.setdefault(encoding, []).append(entry)
    for encoding, entries in groups.items():
        wanted = _wanted(encoding, entries, images_root)
        report = encode_items(wanted, encoder, store.layout.root, images_root, **settings)
        done.encoded.append(report)
        failed = {path for path, _ in report.failed}
        done.missing += [entry.source for entry, path in zip(entries, wanted.paths, strict=True) if path in failed]


def _wanted(encoding: EncodeOptions, entries: list[Entry], images_root: Path) -> LatentItems:
    paths = [os.path.normpath(images_root / entry.source) for entry in entries]
    nbytes, mtimes = stat_files(paths)

    def sizes(values: list[tuple[int, int]]) -> Any:
        return np.array(values, dtype=np.int32).reshape(-1, 2)

    return LatentItems(
        encoding, paths, [e.source for e in entries], sizes([e.original_size for e in entries]),
        sizes([e.fingerprint.bucket_size for e in entries]), sizes([e.fingerprint.resized_size for e in entries]),
        sizes([e.fingerprint.crop for e in entries]), np.array([e.crop_ltrb for e in entries]).reshape(-1, 4),
        [e.caption for e in entries], nbytes, mtimes,
        hash_files(paths) if any(e.fingerprint.source_hash for e in entries) else None,
    )  # fmt: skip
