"""A loader's index that carries its images with it, so that no worker needs state that could be late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ImageKey", "PlannedBatch"]


class PlannedBatch(int):
    """A loader index (its value is the position in the epoch) with all that a worker needs to know.

    Attributes:
        epoch: the epoch as the trainer counts it.
        dataset: position of the dataset in its group.
        images: [B] int32 image numbers within that dataset; an image that is trained twice stands twice.
        seed: for flips, crops and caption shuffles of this batch, the same whichever worker loads it.
        bucket: position in the dataset's buckets at whose size the images are trained.
        global_step: the trainer's step when the batch was asked for; None where nobody counts.
        loss_scale: what the batch's loss is multiplied by, so that images weigh the same on any number of ranks.
    """

    epoch: int
    dataset: int
    images: npt.NDArray[np.int32]
    seed: int
    bucket: int
    global_step: int | None
    loss_scale: float

    @classmethod
    def make(
        cls,
        position: int,
        epoch: int,
        dataset: int,
        images: npt.NDArray[np.int32],
        seed: int,
        bucket: int,
        global_step: int | None = None,
        loss_scale: float = 1.0,
    ) -> PlannedBatch:
        batch = cls(position)
        batch.epoch, batch.dataset, batch.images, batch.seed, batch.bucket = epoch, dataset, images, seed, bucket
        batch.global_step, batch.loss_scale = global_step, loss_scale
        return batch

    def __reduce__(self) -> tuple[Callable[..., PlannedBatch], tuple[Any, ...]]:
        return PlannedBatch.make, (
            int(self), self.epoch, self.dataset, self.images, self.seed, self.bucket, self.global_step, self.loss_scale
        )  # fmt: skip


class ImageKey(str):
    """An image key that knows its row in the dataset, so that no table of all keys is searched for it."""

    __slots__ = ("row",)
    row: int

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)
