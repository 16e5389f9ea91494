"""Where musubi-tuner is held on to."""

from __future__ import annotations

import functools
from typing import Any

from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.adapter.seams import Door, Owners, Seam, Subject
from kohya_bucket.adapter.shapes import Inherits, Offers, Takes, TakesAmong, Uses
from kohya_bucket.musubi.batches import planned_item
from kohya_bucket.musubi.objects import BatchManager, Dataset, Group, Item

__all__ = ["SUBJECTS"]


def _group_item(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def item(self: Group, index: Any) -> Any:
        return planned_item(self, index) if isinstance(index, PlannedBatch) else original(self, index)

    return item


def _sanitize(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def sanitize_user_config(self: Any, user_config: dict[str, Any]) -> Any:
        with exit_with_message():
            user_config = door.read_options(user_config)
        return original(self, user_config)

    return sanitize_user_config


def _prepare_accelerator(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def prepare_accelerator(args: Any) -> Any:
        accelerator = original(args)
        door.resume.watch(accelerator)
        return accelerator

    return prepare_accelerator


def _order(owners: Owners) -> tuple[Seam, ...]:
    manager = "BucketBatchManager"
    used = ("bucket_batch_indices", "buckets", "batch_size", "timestep_pool")
    return (
        Seam("DatasetGroup", (Inherits("__getitem__", "__len__"), Offers(Group))),
        Seam("DatasetGroup.__getitem__", (), _group_item),
        Seam("ImageDataset", (Offers(Dataset),)),
        Seam("VideoDataset", (Offers(Dataset),)),
        Seam("ItemInfo", (Offers(Item),)),
        Seam(manager, (Offers(BatchManager),)),
        Seam(f"{manager}.__getitem__", (Takes("idx"), Uses(*used))),
        Seam("ConfigSanitizer.sanitize_user_config", (TakesAmong("user_config"),), _sanitize),
    )


def _resuming(owners: Owners) -> tuple[Seam, ...]:
    return (Seam("prepare_accelerator", (Takes("args"),), _prepare_accelerator),)


SUBJECTS = (
    Subject("order", "epochs are musubi-tuner's own", _order, orders_epochs=True),
    Subject("resuming", "a run that is resumed starts its epoch again", _resuming),
)
