"""Where musubi-tuner is held on to."""

from __future__ import annotations

import functools
import sys
from typing import Any

from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.adapter.config_source import load_source
from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.adapter.seams import Door, Owners, Seam, Subject
from kohya_bucket.adapter.shapes import Inherits, Offers, Takes, TakesAmong, Uses
from kohya_bucket.errors import ConfigError
from kohya_bucket.musubi.batches import planned_item
from kohya_bucket.musubi.cache_seams import CACHING
from kohya_bucket.musubi.hv_train import mend
from kohya_bucket.musubi.objects import Accelerator, BatchManager, Dataset, Group, Item

__all__ = ["SUBJECTS"]


def _group_item(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def item(self: Group, index: Any) -> Any:
        if not isinstance(index, PlannedBatch):
            return original(self, index)
        with exit_with_message():
            return planned_item(self, index)

    return item


def _sanitize(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def sanitize_user_config(self: Any, user_config: dict[str, Any]) -> Any:
        with exit_with_message():
            user_config = door.read_options(user_config)
            try:
                return original(self, user_config)
            except Exception as error:  # it names neither keys nor what to do, and ends in a traceback
                raise ConfigError(
                    f"musubi-tuner refuses the dataset config: {error}; `kohya-bucket plan` names each mistake in it"
                ) from error

    return sanitize_user_config


def _load(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def load_user_config(file: str) -> Any:
        with exit_with_message():
            load_source(file, "musubi-tuner")
        return original(file)

    return load_user_config


def _make_accelerator(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        door.resume.watch(self)

    return init


def _backward(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def backward(self: Any, loss: Any, **kwargs: Any) -> Any:
        scale = door.resume.loss_scale()
        return original(self, loss if scale == 1 else loss * scale, **kwargs)

    return backward


def _make_group(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def generate_dataset_group_by_blueprint(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("training") and "shared_epoch" not in kwargs:
            mend(sys._getframe(1), door)
        return original(*args, **kwargs)

    return generate_dataset_group_by_blueprint


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
        Seam("load_user_config", (TakesAmong("file"),), _load),
        Seam("ConfigSanitizer.sanitize_user_config", (TakesAmong("user_config"),), _sanitize),
        Seam("generate_dataset_group_by_blueprint", (TakesAmong("training"),), _make_group),
    )


def _resuming(owners: Owners) -> tuple[Seam, ...]:
    return (Seam("Accelerator", (Offers(Accelerator),)), Seam("Accelerator.__init__", (), _make_accelerator))


def _weighing(owners: Owners) -> tuple[Seam, ...]:
    return (Seam("Accelerator.backward", (TakesAmong("loss"),), _backward),)


SUBJECTS = (
    Subject("order", "epochs are musubi-tuner's own", _order, orders_epochs=True),
    Subject("resuming", "a run that is resumed begins its epoch anew", _resuming),
    Subject("weighing", "items of a batch that is shorter than another process' count for more", _weighing),
    CACHING,
)
