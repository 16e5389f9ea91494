"""The images of a dataset as a plan takes them, and the batch at a place of it, loaded by anima_lora's own code."""

from __future__ import annotations

import copy
from collections import ChainMap, Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from kohya_bucket.buckets.sizes import Size
from kohya_bucket.trainers.anima_lora.objects import Dataset, Group
from kohya_bucket.trainers.door.batches import PlannedBatch, batch_of_the_readable
from kohya_bucket.trainers.door.placed import ItemsInBuckets
from kohya_bucket.trainers.sdscripts.batches import own_random, weighed


@dataclass(frozen=True)
class Images(ItemsInBuckets):
    """N images of one dataset, by the keys that the trainer gives them."""

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> Images:
        """What a dataset has put into buckets, where a key stands once for each repeat."""
        manager = dataset.bucket_manager
        times = [Counter(bucket) for bucket in manager.buckets]
        rows = sorted((key, k, n) for k, times_of_key in enumerate(times) for key, n in times_of_key.items())
        return cls(
            [row[0] for row in rows],
            np.array([row[2] for row in rows], dtype=np.int64),
            np.array([row[1] for row in rows], dtype=np.int32),
            [tuple(size) for size in manager.resos],
            [1] * len(manager.resos),
            int(dataset.batch_size),
            None,
        )


HELD = "_kohya_bucket"
"""Attribute of a group: its `Held`."""


class Held(NamedTuple):
    """What a group's workers need, besides the group itself."""

    images: list[Images]
    on_bad_image: str


def planned_item(group: Group, index: PlannedBatch) -> Any:
    """The batch that `index` describes, whatever epoch and step the dataset believes it is in."""
    held: Held = getattr(group, HELD)
    images, dataset = held.images[index.dataset], group.datasets[index.dataset]
    size = images.buckets[index.bucket]

    def make(index: PlannedBatch) -> Any:
        keys = [images.keys[i] for i in index.images.tolist()]
        other = {images.keys[i]: size for i in index.images.tolist() if images.bucket_ids[i] != index.bucket}
        with own_random(index.seed):
            return weighed(_one_batch(dataset, keys, other, index)[0], index.loss_scale)

    return batch_of_the_readable(make, index, images, held.on_bad_image)


def _one_batch(dataset: Any, keys: list[str], other: dict[str, Size], index: PlannedBatch) -> Any:
    """A dataset that holds one batch; `other` has the sizes of what is trained outside of its bucket."""
    one = copy.copy(dataset)
    moved = {key: _cut_to(dataset.image_data[key], size) for key, size in other.items()}
    vars(one).update(
        image_data=ChainMap(moved, dataset.image_data),
        batch_size=len(keys),
        bucket_manager=SimpleNamespace(buckets=[keys]),
        buckets_indices=[SimpleNamespace(bucket_index=0, bucket_batch_size=len(keys), batch_index=0)],
        current_epoch=index.epoch,
    )
    if index.global_step is not None:
        one.current_step = index.global_step
    return one


def _cut_to(image: Any, bucket: Size) -> Any:
    """An image that covers another bucket, which is then cut out of it."""
    moved = copy.copy(image)
    width, height = image.image_size
    factor = max(bucket[0] / width, bucket[1] / height)
    moved.bucket_reso, moved.resized_size = bucket, (round(width * factor), round(height * factor))
    return moved
