"""The items of one data set in their buckets, as a plan takes them; what its caches will hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray

__all__ = ["ItemRow", "PlannedItems"]

BucketKey = tuple[int, ...]
"""Width and height, then what else must be equal in a batch: frames of a clip, or sizes of control images."""


@dataclass(frozen=True)
class ItemRow:
    """One bucket, for tables; crop losses are shares of the resized picture."""

    bucket: BucketKey
    items: int
    samples: int
    batches: int
    short_batches: int
    mean_crop_loss: float
    worst_crop_loss: float


@dataclass(frozen=True)
class PlannedItems:
    """N items of one data set.

    Attributes:
        keys: [N] their names.
        repeats: [N] how often an epoch trains each.
        bucket_ids: [N] int32 position of each in `bucket_keys`.
        bucket_keys: [K] sorted.
        batch_size: items per process and step.
        crop_loss: [N] share of the resized picture that is cropped off.
        of_clips: the third number of a bucket is its frames.
    """

    keys: Sequence[str]
    repeats: npt.NDArray[np.int64]
    bucket_ids: IntArray
    bucket_keys: Sequence[BucketKey]
    batch_size: int
    crop_loss: npt.NDArray[np.float64]
    of_clips: bool = False
    no_upscale = False

    @classmethod
    def of(cls, keys: Sequence[str], buckets: Sequence[BucketKey], repeats: int, batch_size: int,
           crop_loss: npt.NDArray[np.float64], of_clips: bool = False) -> PlannedItems:  # fmt: skip
        """N items whose buckets are given one by one."""
        found = sorted(set(buckets))
        position = {bucket: k for k, bucket in enumerate(found)}
        ids = np.array([position[bucket] for bucket in buckets], dtype=np.int32)
        times = np.full(len(keys), max(repeats, 0), dtype=np.int64)
        return cls(keys, times, ids, found, batch_size, crop_loss, of_clips)

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """[K] (width, height)."""
        return [(key[0], key[1]) for key in self.bucket_keys]

    @property
    def frames(self) -> list[int]:
        """[K] frames of a clip, 1 of an image."""
        return [key[2] if self.of_clips else 1 for key in self.bucket_keys]

    @cached_property
    def resolution_of_bucket(self) -> npt.NDArray[Any]:
        """[K] zeros: a cache has one resolution."""
        return np.zeros(len(self.bucket_keys), dtype=np.intp)

    def rows(self) -> list[ItemRow]:
        """One for each bucket."""
        out = []
        for k, key in enumerate(self.bucket_keys):
            mine = self.bucket_ids == k
            samples = int(self.repeats[mine].sum())
            loss, short = self.crop_loss[mine], samples % self.batch_size > 0
            batches = -(-samples // self.batch_size)
            out.append(
                ItemRow(key, int(mine.sum()), samples, batches, int(short), float(loss.mean()), float(loss.max()))
            )
        return out
