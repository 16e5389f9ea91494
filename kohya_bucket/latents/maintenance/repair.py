"""Repair a store: what is damaged is put aside, and what was in it is encoded again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.images.origins import Origins
from kohya_bucket.latents.encode.encode_items import encode_items
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.maintenance.report import MaintenanceReport
from kohya_bucket.latents.maintenance.rewrite import copy_items, quarantine, writer_like
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import paths_of
from kohya_bucket.latents.store.state import verify, verify_files
from kohya_bucket.latents.store.writer import write_manifest
from kohya_bucket.latents.text.caption import KIND
from kohya_bucket.latents.vae.encoder import encoder_hash

if TYPE_CHECKING:
    from kohya_bucket.latents.vae.encoder import VAEEncoder

__all__ = ["repair"]


def repair(
    store: LatentStore, encoder: VAEEncoder | None = None, *, images_root: Path | None = None, **options: Any
) -> MaintenanceReport:
    """Put damaged shards into quarantine, keep their healthy items, and encode the others again.

    Args:
        encoder: encodes what is lost, if its weights are those of the lost items; None only names them.
        images_root: where the images are, if not where the store says.
        options: see `encode_items`.
    """
    files = verify_files(store)
    done = MaintenanceReport(damaged=list(files))
    if images_root is not None:
        if any(name == store.layout.store_file.name for name, _ in files):
            quarantine(store, store.layout.store_file.name, done)
        store.layout.create(images_root)  # where `store.json` is lost
    bad = verify(store)
    sources = store.strings("source")
    done.damaged += [(sources[i], problem) for i, problem in bad]
    lost = [*store.lost_entries(), *store.entries(i for i, _ in bad)]
    sick = {store.info(i).name for i, _ in bad} | {name for name, _ in files if name in store.shards}
    if sick:
        broken = {i for i, _ in bad}
        keep = [i for i in range(len(store)) if store.info(i).name in sick and i not in broken]
        with writer_like(store, store.layout.root) as writer:
            copy_items(store, keep, writer)
        done.copied = len(keep)
    for name, _ in files:
        if name not in sick and name != store.layout.store_file.name:
            quarantine(store, name, done)
    if sick and not store.indexed:
        write_manifest(store)  # so that the lost rows stay known
    for name in sick:
        quarantine(store, name, done)
    store.refresh()
    if done.damaged:
        write_manifest(store)
    if encoder is not None:
        _encode_again(store, lost, encoder, images_root or store.images_root(), done, options)
    else:
        done.missing = [entry.source for entry in lost]
    store.refresh()
    return done


def _encode_again(
    store: LatentStore,
    lost: list[StoreEntry],
    encoder: VAEEncoder,
    images_root: Path,
    done: MaintenanceReport,
    options: dict[str, Any],
) -> None:
    vae = encoder_hash(encoder)
    groups: dict[EncodeOptions, list[StoreEntry]] = {}
    for entry in lost:
        p = entry.fingerprint
        if p.vae != vae or p.kind == KIND:
            done.missing.append(entry.source)
            continue
        name = p.interpolation.partition("/")[0]
        encoding = EncodeOptions(
            p.vae, p.dtype, p.kind, p.flip, p.mask, "auto" if name == "none" else name, entry.collection
        )
        groups.setdefault(encoding, []).append(entry)
    for encoding, entries in groups.items():
        wanted = _wanted(encoding, entries, images_root)
        report = encode_items(wanted, encoder, store.layout.root, images_root, **options)
        done.encoded.append(report)
        failed = {path for path, _ in report.failed}
        done.missing += [entry.source for entry, path in zip(entries, wanted.paths, strict=True) if path in failed]


def _wanted(encoding: EncodeOptions, entries: list[StoreEntry], images_root: Path) -> LatentItems:
    images = Origins.named(paths_of([entry.source for entry in entries], images_root))
    nbytes, mtimes = images.stamps()

    def sizes(values: list[tuple[int, int]]) -> IntArray:
        return np.array(values, dtype=np.int32).reshape(-1, 2)

    return LatentItems(
        encoding, images, [e.source for e in entries], sizes([e.original_size for e in entries]),
        sizes([e.fingerprint.bucket_size for e in entries]), sizes([e.fingerprint.resized_size for e in entries]),
        sizes([e.fingerprint.crop for e in entries]), np.array([e.crop_ltrb for e in entries]).reshape(-1, 4),
        [e.caption for e in entries], nbytes, mtimes,
        images.hashes() if any(e.fingerprint.source_hash for e in entries) else None,
    )  # fmt: skip
