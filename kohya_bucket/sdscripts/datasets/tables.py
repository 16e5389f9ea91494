"""Stand-ins for the two tables that sd-scripts' datasets look batches up in.

`BaseDataset.__getitem__(index)` asks `self.buckets_indices[index]` which slice of which bucket to train and
then `self.bucket_manager.buckets[...]` for the image keys. Both stand-ins also accept a `PlannedBatch`, an
index that carries its images and its epoch with it, so that no worker needs state that could be late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.batches import ImageKey, PlannedBatch
from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.placed import PlacedDataset
from kohya_bucket.planning import EpochPlan
from kohya_bucket.sdscripts.objects import HeldDataset

__all__ = ["BatchTable", "KeyTable"]


class KeyTable(Sequence[list[str]]):
    """`bucket_manager.buckets`: per bucket the image keys, each as often as it repeats.

    Nothing is stored but one array of image numbers, sorted by bucket. An image with several resolutions stands in
    one bucket of each.
    """

    def __init__(self, images: PlacedDataset) -> None:
        self._keys = images.keys
        order, ids = images.pairs
        self._order = order.astype(np.int32)
        self._repeats = images.repeats
        self._starts = np.searchsorted(ids, np.arange(len(images.buckets) + 1))

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> list[str]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[str]]: ...
    def __getitem__(self, index: int | slice) -> list[str] | list[list[str]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if isinstance(index, PlannedBatch):
            return self._named(index.images)
        k = range(len(self))[index]
        images = self._order[self._starts[k] : self._starts[k + 1]]
        return self._named(np.repeat(images, self._repeats[images]))

    def _named(self, images: npt.NDArray[np.int32]) -> list[str]:
        keys: list[str] = []
        for row in images.tolist():
            key = ImageKey(self._keys[row])
            key.row = row
            keys.append(key)
        return keys

    def __iter__(self) -> Iterator[list[str]]:
        return (self[k] for k in range(len(self)))


class BatchTable(Sequence[Any]):
    """`buckets_indices`: one entry per batch of an epoch on one process.

    A plain integer is answered from the plan of the dataset's current epoch, so that code which walks a
    dataset by number (sd-scripts' dataset preview does) sees each epoch's batches once, in a new order.

    Args:
        images: the dataset's images.
        make_entry: sd-scripts' own entry type, called with bucket index, batch size, batch number.
        clock: the dataset, whose `seed` and `current_epoch` say which epoch's plan is asked for.
    """

    def __init__(
        self,
        images: PlacedDataset,
        make_entry: Callable[[Any, int, int], Any],
        clock: HeldDataset,
        options: AdapterOptions,
    ) -> None:
        self.images = images
        self.options = options
        self._make_entry = make_entry
        self._clock = clock
        self._planner: GroupPlanner | None = None
        self._planned: tuple[tuple[int, int], EpochPlan] | None = None

    def _plan(self) -> EpochPlan:
        now = (int(self._clock.seed), int(self._clock.current_epoch))
        if self._planned is None or self._planned[0] != now:
            if self._planner is None:
                self._planner = GroupPlanner([self.images], self.options)
            self._planned = (now, self._planner.plan(*now, world_size=1))
        return self._planned[1]

    def __len__(self) -> int:
        return self._plan().steps

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not isinstance(index, PlannedBatch):
            plan = self._plan()
            seed, epoch = int(self._clock.seed), int(self._clock.current_epoch)
            position = range(plan.steps)[index]
            bucket = int(plan.bucket_of_step[position])
            index = PlannedBatch.make(position, epoch, 0, plan.indices(position, 0), seed, bucket)
        return self._make_entry(index, len(index.images), 0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planner": None, "_planned": None}
