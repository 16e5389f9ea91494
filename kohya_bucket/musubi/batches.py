"""The batch at a place of the plan, made by musubi-tuner's own batch manager."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, NamedTuple

from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.adapter.replaced_images import batch_of_the_readable
from kohya_bucket.musubi.items import CachedItems
from kohya_bucket.musubi.objects import BatchManager, Group

__all__ = ["HELD", "Held", "TimestepPool", "planned_item"]

HELD = "_kohya_bucket"
"""Attribute of a group: its `Held`."""


class Held(NamedTuple):
    """What a group's workers need, besides the group itself."""

    items: list[CachedItems]
    timesteps: TimestepPool
    on_bad_image: str


def planned_item(group: Group, index: PlannedBatch) -> Any:
    """The batch that `index` describes, whatever epoch the data set believes it is in."""
    held: Held = getattr(group, HELD)
    mine = held.items[index.dataset]
    manager: BatchManager = group.datasets[index.dataset].batch_manager

    def make(index: PlannedBatch) -> Any:
        chosen = [mine.items[i] for i in index.images.tolist()]
        bucket = mine.bucket_keys[index.bucket]
        timesteps = held.timesteps.of(manager.num_timestep_buckets, index)
        one_batch = SimpleNamespace(**vars(manager))  # forks keep more there
        one_batch.batch_size, one_batch.buckets = len(chosen), {bucket: chosen}
        one_batch.bucket_batch_indices = [(bucket, 0)]
        one_batch.timestep_pool = None if timesteps is None else [timesteps]
        return type(manager).__getitem__(one_batch, 0)  # type: ignore[index]

    try:
        return make(index)
    except MemoryError:
        raise
    except Exception as error:
        return batch_of_the_readable(make, index, mine, error, held.on_bad_image)


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

    def of(self, parts: int | None, index: PlannedBatch) -> list[float] | None:
        """The timesteps of a batch: by its position in the epoch, so that no two processes share theirs."""
        if parts is None or parts < 2:
            return None
        seed = index.seed - int(index)  # one for all batches of an epoch
        if self._made is None or self._made[0] != (seed, parts):
            self._made = (seed, parts), self._draw(seed, parts)
        pool = self._made[1]
        first = int(index) * self._batch_size
        return [pool[(first + i) % len(pool)] for i in range(len(index.images))]

    def _draw(self, seed: int, parts: int) -> list[float]:
        draws = random.Random(seed)
        each = -(-self._samples // parts)
        pool = [draws.uniform(part / parts, (part + 1) / parts) for part in range(parts) for _ in range(each)]
        draws.shuffle(pool)
        return pool
