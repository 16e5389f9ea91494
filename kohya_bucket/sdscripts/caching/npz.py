"""Latents in sd-scripts' own npz files, for one caching call."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from kohya_bucket.adapter.ranks import wait_for_ranks
from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import GroupedSync
from kohya_bucket.latents.fingerprint import Reason
from kohya_bucket.latents.npz.check import holds_npz
from kohya_bucket.latents.npz.names import NpzNames
from kohya_bucket.latents.npz.read_write import read_npz
from kohya_bucket.sdscripts.caching.extra_sizes import SizedPath
from kohya_bucket.sdscripts.caching.item import CacheItem, save_latents, settle_latents
from kohya_bucket.sdscripts.caching.session import CachingSession

__all__ = ["NpzSession", "forget_names"]

logger = logging.getLogger("kohya_bucket")

# by strategy, of which sd-scripts has one in each run: the files that its datasets have taken so far
_names: WeakKeyDictionary[Any, NpzNames] = WeakKeyDictionary()


class NpzSession(CachingSession):
    """sd-scripts' own npz files and names, each written whole and checked before it counts.

    Attributes:
        moved: how many latents of other versions' files were put where this sd-scripts finds them.
    """

    moved: int = 0
    _pool: ThreadPoolExecutor | None = None
    _groups: GroupedSync | None = None

    def paths_of(self, infos: list[Any]) -> list[str]:
        names = _names.setdefault(self.strategy, NpzNames(self.arch))
        paths = names.add(
            [str(info.absolute_path) for info in infos],
            [as_pair(info.image_size) for info in infos],
            [as_pair(info.bucket_reso) for info in infos],
            [as_pair(info.resized_size) for info in infos],
            [isinstance(info.absolute_path, SizedPath) for info in infos],
            self.strategy.get_latents_npz_path,
        )
        return [str(path) for path in paths]

    def exists(self, path: str, item: CacheItem) -> bool:
        return holds_npz(Path(path), as_pair(item.bucket_reso), self.arch)

    def why_missing(self, path: str, item: CacheItem) -> list[Reason]:
        """Also puts latents that serve where this sd-scripts finds them: another version may have written them."""
        reasons, moved = settle_latents(path, item, self.arch)
        self.moved += moved
        return reasons

    def save(
        self, path: str, item: CacheItem, latents: Any, crop_ltrb: Any, flipped: Any, alpha_mask: Any, sized: bool
    ) -> None:
        save_latents(path, item, self.arch.with_sizes(sized), latents, crop_ltrb, flipped, alpha_mask, sync=False)
        if self._groups is None:
            self._pool = ThreadPoolExecutor(4, thread_name_prefix="kohya-bucket-npz")
            self._groups = GroupedSync(self._pool, lambda _: None)
        self._groups.add(Path(path), 0)

    def stored(self, path: str, item: CacheItem) -> tuple[Any, Any]:
        found = read_npz(Path(path), as_pair(item.bucket_reso), self.arch)
        return found.flipped, found.alpha_mask

    def keep(self) -> None:
        with suppress(LatentStoreError):  # there is an error already
            self._wait_for_the_disk()

    def _wait_for_the_disk(self) -> None:
        if self._groups is None or self._pool is None:
            return
        try:
            self._groups.finish()
        finally:
            self._pool.shutdown()
            self._pool = self._groups = None

    def finish(self) -> None:
        self._wait_for_the_disk()
        if self.moved:
            logger.info("%d latents were cached by another version, and are put where this one finds them", self.moved)
        wait_for_ranks()


def forget_names() -> None:
    """Let go of the files, of which there is a row for each image, once all data sets have cached."""
    _names.clear()
