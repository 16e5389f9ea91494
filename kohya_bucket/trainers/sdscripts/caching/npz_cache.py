"""Latents in sd-scripts' own files: checked and written here, or by the trainer's own code."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import GroupedSync
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.latents.fingerprint import Stale, StaleReason
from kohya_bucket.trainers.door.ranks import wait_for_ranks
from kohya_bucket.trainers.sdscripts.caching.session import CacheItem, save_by_trainer, save_latents, why_npz_stale
from kohya_bucket.trainers.sdscripts.families import Family
from kohya_bucket.trainers.sdscripts.npz.check import ensure_current, holds_npz
from kohya_bucket.trainers.sdscripts.npz.read_write import read_npz

logger = logging.getLogger("kohya_bucket")


@dataclass
class NpzCache:
    """sd-scripts' own npz files and names, each written whole and checked before it counts.

    Attributes:
        moved: how many latents of other versions' files were put where this sd-scripts finds them.
    """

    arch: Family
    moved: int = 0

    def __post_init__(self) -> None:
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="kohya-bucket-npz")
        self._groups = GroupedSync(self._pool)

    def holds(self, item: CacheItem) -> bool:
        """Whether there is anything on disk, good or not."""
        return holds_npz(Path(item.path), as_pair(item.bucket_reso), self.arch)

    def why_missing(self, item: CacheItem) -> list[StaleReason]:
        """Why an item must be encoded; none if it is on disk as it should be.

        Also puts latents that serve where this sd-scripts finds them: another version may have written them.
        """
        entry, unknown = item.to_compare()
        reasons, moved = ensure_current(Path(item.path), entry, self.arch, Path(item.image), ignoring=unknown)
        self.moved += moved
        return reasons

    def save(self, item: CacheItem, latents: Any, crop_ltrb: Any, flipped: Any, alpha_mask: Any, *, keys: str) -> None:
        """Write an item; what the names of its arrays end in is as sd-scripts' own `save` is told."""
        self._write(item, latents, crop_ltrb, flipped, alpha_mask, keys)
        self._groups.add(Path(item.path))

    def _write(self, item: CacheItem, latents: Any, crop_ltrb: Any, flipped: Any, alpha_mask: Any, keys: str) -> None:
        arch = self.arch.with_sizes(bool(keys))
        save_latents(item.path, item, arch, latents, crop_ltrb, flipped, alpha_mask, sync=False)

    def stored(self, item: CacheItem) -> tuple[Any, Any]:
        found = read_npz(Path(item.path), as_pair(item.bucket_reso), self.arch)
        return found.flipped, found.alpha_mask

    def keep(self) -> None:
        """Where the loop ended half-way, by Ctrl-C or an error: put on disk what is encoded."""
        with suppress(LatentStoreError):  # there is an error already
            self._wait_for_the_disk()

    def _wait_for_the_disk(self) -> None:
        try:
            self._groups.finish()
        finally:
            self._pool.shutdown()

    def finish(self) -> None:
        self._wait_for_the_disk()
        if self.moved:
            logger.info("%d latents were cached by another version, and are put where this one finds them", self.moved)
        wait_for_ranks()


@dataclass
class TrainersNpz(NpzCache):
    """Npz of a family that is not known here, written and read by the trainer's own code: put in place whole, with
    what they were made from, by which they are checked.
    """

    strategy: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("save_latents_to_disk", "load_latents_from_disk", "is_disk_cached_latents_expected")
        self._save, self._load, self._accepts = (getattr(self.strategy, name) for name in names)

    def holds(self, item: CacheItem) -> bool:
        return Path(item.path).exists()

    def why_missing(self, item: CacheItem) -> list[StaleReason]:
        if reasons := why_npz_stale(item.path, item):
            return reasons
        try:
            good = self._accepts(item.bucket_reso, item.path, item.flip, item.alpha_mask)
        except OSError:
            raise
        except Exception as error:  # whatever a reader raises at what it does not expect
            return [StaleReason(Stale.BROKEN, not_loaded(error))]
        return [] if good else [StaleReason(Stale.PART, "{}x{}".format(*item.bucket_reso))]

    def _write(self, item: CacheItem, latents: Any, crop_ltrb: Any, flipped: Any, alpha_mask: Any, keys: str) -> None:
        def save(path: str) -> None:
            self._save(path, latents, list(item.original_size), crop_ltrb, flipped, alpha_mask, keys)

        save_by_trainer(item.path, item, save, latents, flipped, keys)

    def stored(self, item: CacheItem) -> tuple[Any, Any]:
        import torch

        flipped, mask = (
            None if part is None else torch.as_tensor(part) for part in self._load(item.path, item.bucket_reso)[3:5]
        )
        return flipped, mask
