"""The cache of latents: sd-scripts' own loops over images, with checked and whole files, or shards, under them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.ranks import is_first_process, stop_all_ranks_on_error
from kohya_bucket.latents.fingerprint import module_hash
from kohya_bucket.sdscripts.caching.item import architecture_of, architecture_read_by
from kohya_bucket.sdscripts.caching.npz import NpzSession, forget_names
from kohya_bucket.sdscripts.caching.readable import cache_the_readable
from kohya_bucket.sdscripts.caching.replaced import replaced
from kohya_bucket.sdscripts.caching.session import forget_wishes
from kohya_bucket.sdscripts.caching.shard_order import remember_cache
from kohya_bucket.sdscripts.caching.shards import ShardSession
from kohya_bucket.sdscripts.datasets.wording import recached_lines

__all__ = ["Original", "cache_latents", "forget_files"]

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


def forget_files() -> None:
    """Let go of what datasets share, of which there is a row for each image, once all have cached."""
    forget_names()
    forget_wishes()
