"""The cache of latents: sd-scripts' own loops over images, with checked and whole files, or shards, under them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.ranks import is_first_process, stop_all_ranks_on_error, wait_for_ranks
from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import GroupedSync
from kohya_bucket.latents.fingerprint import Reason, module_hash
from kohya_bucket.latents.npz.check import holds_npz
from kohya_bucket.latents.npz.names import NpzNames
from kohya_bucket.latents.npz.read_write import read_npz
from kohya_bucket.sdscripts.caching.extra_sizes import SizedPath
from kohya_bucket.sdscripts.caching.readable import cache_the_readable
from kohya_bucket.sdscripts.caching.session import (
    CacheItem,
    CachingSession,
    architecture_of,
    architecture_read_by,
    ensure_npz_current,
    replaced,
    save_latents,
    shared_by,
)
from kohya_bucket.sdscripts.caching.shards import ShardSession, remember_cache
from kohya_bucket.sdscripts.wording import recached_lines

logger = logging.getLogger("kohya_bucket")

Original = Callable[[Any, Any, Any], Any]


@stop_all_ranks_on_error()
def cache_latents(
    dataset: Any, original: Original, strategy: Any, model: Any, accelerator: Any, options: AdapterOptions
) -> None:
    """`BaseDataset.new_cache_latents`, with the cache of this package under it where latents go to disk."""
    on_disk = strategy is not None and strategy.cache_to_disk
    in_shards = options.latent_cache == "shards"
    arch = None
    if on_disk:
        arch = architecture_of(strategy.cache_suffix) if in_shards else architecture_read_by(strategy)

    def cache() -> None:
        original(dataset, model, accelerator)

    if arch is None or not dataset.image_data:
        cache_the_readable(dataset, cache, options)
        return
    kind = ShardSession if in_shards else NpzSession
    session = kind(dataset, strategy, arch, options, _hash_of(model))
    with replaced(strategy, session.methods()):
        try:
            cache_the_readable(dataset, cache, options)
        except BaseException:
            session.keep()
            raise
    session.finish()
    if isinstance(session, ShardSession):
        remember_cache(dataset, session.cache)
    if is_first_process() and session.reasons:
        logger.warning("\n".join(recached_lines(session.reasons)))


_hashes: WeakKeyDictionary[Any, tuple[object, str]] = WeakKeyDictionary()


def _hash_of(model: Any) -> str:
    """Hash of a VAE's weights, computed once per run and not for each data set; "" for what has none."""
    if not hasattr(model, "state_dict"):
        return ""
    # these numbers change with any change of the weights
    state = [(tensor.data_ptr(), tensor._version) for tensor in model.state_dict().values()]
    known = _hashes.get(model)
    if known is None or known[0] != state:
        known = _hashes[model] = (state, module_hash(model))
    return known[1]


# Latents in sd-scripts' own npz files, for one caching call.


class NpzSession(CachingSession):
    """sd-scripts' own npz files and names, each written whole and checked before it counts.

    Attributes:
        moved: how many latents of other versions' files were put where this sd-scripts finds them.
    """

    moved: int = 0
    _pool: ThreadPoolExecutor | None = None
    _groups: GroupedSync | None = None

    def paths_of(self, infos: list[Any]) -> list[str]:
        shared = shared_by(self.strategy)
        shared.names = shared.names or NpzNames(self.arch)
        paths = shared.names.add(
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
        reasons, moved = ensure_npz_current(path, item, self.arch)
        self.moved += moved
        return reasons

    def save(
        self, path: str, item: CacheItem, latents: Any, crop_ltrb: Any, flipped: Any, alpha_mask: Any, sized: bool
    ) -> None:
        save_latents(path, item, self.arch.with_sizes(sized), latents, crop_ltrb, flipped, alpha_mask, sync=False)
        if self._groups is None:
            self._pool = ThreadPoolExecutor(4, thread_name_prefix="kohya-bucket-npz")
            self._groups = GroupedSync(self._pool)
        self._groups.add(Path(path))

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
