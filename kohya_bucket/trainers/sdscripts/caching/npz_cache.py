"""Latents in sd-scripts' own files: checked and written here, or by the trainer's own code."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.files import GroupedSync
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.latents.fingerprint import NOTE, Stale, StaleReason
from kohya_bucket.latents.store.storage import is_there
from kohya_bucket.trainers.door.ranks import wait_for_ranks
from kohya_bucket.trainers.sdscripts.caching.session import CacheItem, as_array, save_latents, temporary_folder
from kohya_bucket.trainers.sdscripts.families import Family
from kohya_bucket.trainers.sdscripts.npz.check import ensure_current, holds_npz, origin_reasons
from kohya_bucket.trainers.sdscripts.npz.read_write import (
    BrokenNpzError,
    OpenNpz,
    file_reason,
    note_of,
    read_note,
    read_npz,
    write_arrays,
)

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

    def stale_reasons(self, item: CacheItem) -> list[StaleReason]:
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
        latents = read_npz(Path(item.path), as_pair(item.bucket_reso), self.arch)
        return latents.flipped, latents.alpha_mask

    def flush(self) -> None:
        """Wait for the disk."""
        try:
            self._groups.finish()
        finally:
            self._pool.shutdown()

    def finish(self) -> None:
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
        return is_there(Path(item.path))

    def stale_reasons(self, item: CacheItem) -> list[StaleReason]:
        if reasons := _noted_reasons(item):
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

        _save_by_trainer(item.path, item, save, latents, keys)

    def stored(self, item: CacheItem) -> tuple[Any, Any]:
        import torch

        flipped, mask = (
            None if part is None else torch.as_tensor(part) for part in self._load(item.path, item.bucket_reso)[3:5]
        )
        return flipped, mask


def _noted_reasons(item: CacheItem) -> list[StaleReason]:
    """Why a file does not serve for an item, by all that is known without its family; none if it does, or may."""
    entry, ignoring = item.to_compare()
    try:
        with OpenNpz(Path(item.path)) as file:
            if fault := file.fault():
                return [fault]
            for name in (name for name in file.names if name.startswith("original_size")):
                size = tuple(map(int, file.numbers(name, 2)))
                if size != entry.original_size:
                    return [StaleReason(Stale.IMAGE_SIZE, *size, *entry.original_size)]
            bucket = entry.fingerprint.bucket_size
            ends = [name.removeprefix(NOTE) for name in file.names if name.startswith(NOTE)]
            ends = [end for end in ends if (note := read_note(file, end)) and note[0].bucket_size == bucket]
            return origin_reasons(file, (ends or ["none"])[0], entry.fingerprint, Path(item.image), ignoring)
    except (FileNotFoundError, BrokenNpzError) as error:
        return [file_reason(error)]


def _save_by_trainer(
    path: str | os.PathLike[str], item: CacheItem, save: Callable[[str], object], latents: Any, keys: str
) -> None:
    """Put in place whole what a trainer's `save` writes to the path that it is given, or adds to the file there, with
    the fingerprint of the latents, whose arrays' names end in `keys`.

    Raises:
        LatentStoreError: the disk refuses.
    """
    with temporary_folder() as folder:
        made = folder / Path(path).name
        before = _arrays_in(Path(path))
        if before:
            write_arrays(made, before, sync=False)
        save(str(made))
        arrays = _arrays_in(made)
    note = note_of(item.fingerprint(), Path(item.image).name, arrays.get(f"latents{keys}", as_array(latents)))
    new = {name: a for name, a in arrays.items() if name not in before or not np.array_equal(a, before[name])}
    write_arrays(Path(path), {**new, f"{NOTE}{keys}": note}, sync=False)


def _arrays_in(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file that can be read: none of one that is missing or not an npz."""
    arrays = {}
    with suppress(FileNotFoundError, BrokenNpzError), OpenNpz(path) as file:
        for name in file.names:
            with suppress(BrokenNpzError):
                arrays[name] = file.array(name)
    return arrays
