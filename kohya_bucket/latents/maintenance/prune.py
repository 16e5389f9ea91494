"""Prune a store: take out items, replaced rows and what interrupted writers left."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from kohya_bucket.files import TEMPORARY_AGE
from kohya_bucket.latents.maintenance.report import MaintenanceReport
from kohya_bucket.latents.maintenance.rewrite import copy_items, remove_file, remove_shards, writer_like
from kohya_bucket.latents.remote.remote_path import Place
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.state import temporary_files

__all__ = ["prune"]


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
    rows = {name: info.rows for name, info in store.shards.items()}
    loose = [name for name, items in live.items() if len(items) < rows[name]]
    done.dropped = len(dropped)
    done.copied = sum(len(live[name]) for name in loose)
    done.freed = sum(int(store.shards[n].nbytes * (1 - len(live[n]) / max(1, rows[n]))) for n in loose)
    old: list[Place] = [
        Path(path) for path in temporary_files(store) if time.time() - os.path.getmtime(path) > TEMPORARY_AGE
    ]
    if quarantine and store.layout.quarantine.is_dir():
        old += store.layout.quarantine.iterdir()
    if dry_run:
        done.removed = [*loose, *map(str, old)]
        return done
    with writer_like(store, store.layout.root) as writer:
        copy_items(store, [i for name in loose for i in live[name]], writer)
    remove_shards(store, loose, done, forget_lost=not store.damage)
    for path in old:
        remove_file(path, done)
    return done
