"""The batch at a place of the plan, made by sd-scripts' own data sets."""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.adapter.replaced_images import batch_of_the_readable
from kohya_bucket.errors import ConfigError
from kohya_bucket.sdscripts.caching.extra_sizes import at_planned_size
from kohya_bucket.sdscripts.datasets.masks import drop_unwanted_masks
from kohya_bucket.sdscripts.loss_weights import weighed
from kohya_bucket.sdscripts.objects import Group, HeldDataset, inner_of

__all__ = ["note_epoch", "numbered_item", "own_random", "planned_item"]


def note_epoch(dataset: HeldDataset, epoch: int) -> None:
    """Note the epoch. The order of an epoch follows from its number, so nothing is shuffled here."""
    dataset.current_epoch = epoch
    inner_of(dataset).current_epoch = epoch


def planned_item(group: Group, index: PlannedBatch) -> Any:
    """The batch that `index` describes, whatever epoch and step the dataset believes it is in."""
    dataset: HeldDataset = group.datasets[index.dataset]
    note_epoch(dataset, index.epoch)
    owner = inner_of(dataset)
    if index.global_step is not None:
        owner.current_step = index.global_step

    def make(index: PlannedBatch) -> Any:
        keys = owner.bucket_manager.buckets[index]
        with own_random(index.seed), at_planned_size(dataset, index):
            batch = drop_unwanted_masks(dataset[index], keys, owner.image_to_subset)
        return weighed(batch, index.loss_scale)

    try:
        return make(index)
    except (MemoryError, ConfigError):
        raise
    except Exception as error:
        table = dataset.buckets_indices
        return batch_of_the_readable(make, index, table.images, error, table.options.on_bad_image)


def numbered_item(group: Group, number: int) -> Any:
    """The batch that stands at a number, for code that walks a group without a loader's sampler.

    Raises:
        ConfigError: a tool of sd-scripts is caching, which knows one size for each image.
    """
    number = range(len(group))[number]
    k = bisect.bisect_right(group.cumulative_sizes, number)
    dataset = group.datasets[k]
    if getattr(dataset, "caching_mode", None) is not None:
        raise ConfigError(
            "sd-scripts' caching tools cache each image at one size: use the trainer's own --cache_latents, or leave "
            "resolutions and remainder = 'merge' or 'catch_all' out"
        )
    batch = dataset.buckets_indices[number - (group.cumulative_sizes[k - 1] if k else 0)].bucket_index
    return planned_item(group, PlannedBatch.make(int(batch), batch.epoch, k, batch.images, batch.seed, batch.bucket))


@contextmanager
def own_random(seed: int) -> Iterator[None]:
    """Draw flips, crops and caption shuffles from `seed`, and leave the process's `random` as it was.

    Batches then differ from each other, and do not depend on which worker loads them or on a resume.
    """
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)
