"""The cached items of a dataset as a plan takes them, and the batch at a place of the plan, made by musubi-tuner's own
batch manager.
"""

from __future__ import annotations

import copy
import errno
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.fingerprint import Stale, StaleReason
from kohya_bucket.latents.finite import first_not_finite
from kohya_bucket.trainers.door.batches import PlannedBatch, batch_of_the_readable
from kohya_bucket.trainers.door.placed import ItemsInBuckets
from kohya_bucket.trainers.musubi.objects import BatchManager, CachedItem, Dataset, Group


@dataclass(frozen=True)
class CachedItems(ItemsInBuckets):
    """N items of one dataset, in an order that no file system decides, with musubi-tuner's own records of them."""

    items: list[CachedItem]

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> CachedItems:
        """What a dataset has found, each item once; musubi-tuner holds an item as often as it is repeated."""
        manager = dataset.batch_manager
        bucket_keys = sorted(manager.buckets, key=repr)
        rows: list[tuple[str, int, int, CachedItem]] = []
        for k, bucket in enumerate(bucket_keys):
            times = Counter(str(item.latent_cache_path) for item in manager.buckets[bucket])
            items = {str(item.latent_cache_path): item for item in reversed(manager.buckets[bucket])}
            rows += [(Path(path).name, k, times[path], item) for path, item in items.items()]
        rows.sort(key=lambda row: row[:2])
        firsts = [next(iter(manager.buckets[key]), None) for key in bucket_keys]
        frames = [int(getattr(item, "frame_count", None) or 1) for item in firsts]
        return cls(
            [row[0] for row in rows],
            np.array([row[2] for row in rows], dtype=np.int64),
            np.array([row[1] for row in rows], dtype=np.int32),
            bucket_keys,
            frames,
            int(manager.batch_size),
            as_pair(dataset.resolution),
            [row[3] for row in rows],
        )


HELD = "_kohya_bucket"
"""Attribute of a group: its `Held`."""


class Held(NamedTuple):
    """What a group's workers need, besides the group itself."""

    items: list[CachedItems]
    timesteps: TimestepPool
    on_bad_image: str


def planned_item(group: Group, index: PlannedBatch) -> Any:
    """The batch that `index` describes, whatever epoch the dataset believes it is in."""
    held: Held = getattr(group, HELD)
    dataset_items = held.items[index.dataset]
    manager: BatchManager = group.datasets[index.dataset].batch_manager

    def make(index: PlannedBatch) -> Any:
        chosen = [dataset_items.items[i] for i in index.images.tolist()]
        bucket = dataset_items.bucket_keys[index.bucket]
        timesteps = held.timesteps.draw(manager.num_timestep_buckets, index)
        one_batch = copy.copy(manager)
        vars(one_batch).update(
            batch_size=len(chosen),
            buckets={bucket: chosen},
            bucket_batch_indices=[(bucket, 0)],
            timestep_pool=None if timesteps is None else [timesteps],
        )
        try:
            batch = type(manager).__getitem__(one_batch, 0)  # type: ignore[index]
        except FileNotFoundError as error:
            if error.filename or not (path := _first_gone(chosen)):
                raise
            # safetensors does not say of which file it is
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        if name := first_not_finite(_tensors_of(batch)):
            why = f"{StaleReason(Stale.NOT_FINITE, name)}: remove its cache, and make it again"
            raise LatentStoreError(why)
        return batch

    return batch_of_the_readable(make, index, dataset_items, held.on_bad_image)


def _tensors_of(batch: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What was read of caches, with the names that it has in the batch."""
    for name, value in batch.items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        yield from ((name, part) for part in parts if hasattr(part, "isfinite"))


def _first_gone(items: Sequence[CachedItem]) -> str | None:
    """The first cache of the items that is not there."""
    paths = (path for one in items for path in (one.latent_cache_path, one.text_encoder_output_cache_path))
    return next((path for path in paths if not os.path.exists(path)), None)


class TimestepPool:
    """Timesteps of an epoch, drawn evenly from each of so many parts of [0, 1), as musubi-tuner draws them.

    They depend on the seed that the plan has, which is the earlier run's where a run is resumed.

    Args:
        samples: trainings of the largest epoch, all processes together, a full batch counted for each.
        batch_size: the largest.
    """

    def __init__(self, samples: int, batch_size: int) -> None:
        self._samples, self._batch_size = samples, batch_size
        self._made: tuple[tuple[int, int], list[float]] | None = None

    def draw(self, parts: int | None, index: PlannedBatch) -> list[float] | None:
        """The timesteps of a batch: by its position in the epoch, so that no two processes share theirs."""
        if parts is None or parts < 2:
            return None
        seed = index.seed - index.position  # one for all batches of an epoch
        if self._made is None or self._made[0] != (seed, parts):
            self._made = (seed, parts), self._draw(seed, parts)
        pool = self._made[1]
        first = index.position * self._batch_size
        return [pool[(first + i) % len(pool)] for i in range(len(index.images))]

    def _draw(self, seed: int, parts: int) -> list[float]:
        draws = random.Random(seed)
        each = -(-self._samples // parts)
        pool = [draws.uniform(part / parts, (part + 1) / parts) for part in range(parts) for _ in range(each)]
        draws.shuffle(pool)
        return pool
