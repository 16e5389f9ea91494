"""The items of a data set of musubi-tuner, which lie in caches of one size each, as a plan takes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.musubi.objects import BatchManager, Bucket, Item

__all__ = ["CachedItems"]


@dataclass(frozen=True)
class CachedItems:
    """N items of one data set, in an order that no file system decides.

    Attributes:
        items: [N] musubi-tuner's own records.
        keys: [N] their files' names.
        repeats: [N] how often an epoch trains each.
        bucket_ids: [N] int32 position of each in `bucket_keys`.
        bucket_keys: [K] what must be equal in a batch, sorted as text.
        batch_size: items per process and step.
    """

    items: list[Item]
    keys: list[str]
    repeats: npt.NDArray[np.int64]
    bucket_ids: IntArray
    bucket_keys: list[Bucket]
    batch_size: int
    no_upscale = False

    @classmethod
    def of(cls, manager: BatchManager) -> CachedItems:
        """What a data set has found, each item once; musubi-tuner holds an item as often as it is repeated."""
        bucket_keys = sorted(manager.buckets, key=repr)
        rows: list[tuple[str, int, int, Item]] = []
        for k, bucket in enumerate(bucket_keys):
            times: dict[str, int] = {}
            items: dict[str, Item] = {}
            for item in manager.buckets[bucket]:
                path = str(item.latent_cache_path)
                times[path] = times.get(path, 0) + 1
                items.setdefault(path, item)
            rows += [(os.path.basename(path), k, times[path], item) for path, item in items.items()]  # noqa: PTH119
        rows.sort(key=lambda row: row[:2])
        return cls(
            [row[3] for row in rows],
            [row[0] for row in rows],
            np.array([row[2] for row in rows], dtype=np.int64),
            np.array([row[1] for row in rows], dtype=np.int32),
            bucket_keys,
            int(manager.batch_size),
        )

    @cached_property
    def buckets(self) -> list[tuple[int, int]]:
        """[K] (width, height)."""
        return [(int(key[0]), int(key[1])) for key in self.bucket_keys]

    @cached_property
    def frames(self) -> list[int]:
        """[K] frames of a clip, 1 of an image."""
        frames = [1] * len(self.bucket_keys)
        for bucket, item in zip(self.bucket_ids.tolist(), self.items, strict=True):
            frames[bucket] = int(getattr(item, "frame_count", None) or 1)
        return frames

    @cached_property
    def pairs(self) -> tuple[npt.NDArray[np.intp], IntArray]:
        """([N] item, [N] bucket)."""
        return np.arange(len(self.keys)), self.bucket_ids

    @cached_property
    def resolution_of_bucket(self) -> npt.NDArray[Any]:
        """[K] zeros: a cache has one resolution."""
        return np.zeros(len(self.bucket_keys), dtype=np.intp)
