"""Which shard each image's latent lies in, for an order that reads few shards at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from kohya_bucket.adapter.placed import PlacedDataset
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import ConfigError
from kohya_bucket.sdscripts.caching.shards import ShardCache
from kohya_bucket.sdscripts.objects import HeldDataset, inner_of

__all__ = ["remember_cache", "shard_numbers"]

_caches: WeakKeyDictionary[Any, ShardCache] = WeakKeyDictionary()


def remember_cache(dataset: Any, cache: ShardCache) -> None:
    """Called when all latents of a data set are in its store."""
    _caches[dataset] = cache


def shard_numbers(datasets: Sequence[HeldDataset], images: Sequence[PlacedDataset], open_shards: int) -> IntArray:
    """[N] number of the shard of each image of all data sets; 0 for those that are never trained.

    Each shard that is read from is kept on this node for a while from now on, also of a store larger than the limit.

    Raises:
        ConfigError: a data set's latents are not in shards.
    """
    names: list[str] = []
    for dataset, placed in zip(datasets, images, strict=True):
        cache = _caches.get(inner_of(dataset))
        if cache is None:
            raise ConfigError(
                "[kohya_bucket] order is 'local', but latents are not cached in shards: train with --cache_latents "
                "and --cache_latents_to_disk, or leave order out"
            )
        cache.keep_shards(open_shards)
        records = dataset.image_data
        for key, size, there in zip(
            placed.keys, placed.placement.bucket_sizes.tolist(), placed.placement.placed, strict=True
        ):
            names.append(cache.shard_of(records[key].absolute_path, (size[0], size[1])) if there else "")
    return np.unique(np.array(names, dtype=object), return_inverse=True)[1].astype(np.int32)
