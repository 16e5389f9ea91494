"""The order of an epoch, and the batch at a place in it."""

from __future__ import annotations

from typing import Any

from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.adapter.seams import Owners, Place, Seam, Subject
from kohya_bucket.adapter.shapes import Inherits, Says, Takes, Uses
from kohya_bucket.sdscripts.datasets.tables import BatchTable
from kohya_bucket.sdscripts.objects import Dataset, Group
from kohya_bucket.sdscripts.planned_item import note_epoch, numbered_item, planned_item

__all__ = ["BATCHES"]


def _shuffle_buckets(place: Place, self: Dataset) -> None:
    if not isinstance(self.buckets_indices, BatchTable):
        place.original(self)


def _set_current_epoch(place: Place, self: Dataset, epoch: int) -> None:
    note_epoch(self, epoch)


def _group_item(place: Place, self: Group, index: int, /) -> Any:
    if isinstance(index, PlannedBatch):
        with exit_with_message():
            return planned_item(self, index)
    tables = [getattr(dataset, "buckets_indices", None) for dataset in self.datasets]
    if all(isinstance(table, BatchTable) and table.options.several_sizes for table in tables):
        with exit_with_message():
            return numbered_item(self, index)
    return place.original(self, index)


def _seams(owners: Owners) -> tuple[Seam, ...]:
    delegate, entry = "dreambooth_dataset_delegate", ("bucket_index", "bucket_batch_size", "batch_index")
    tables = ("bucket_manager", "buckets", "buckets_indices")
    return (
        Seam("BaseDataset.shuffle_buckets", (), _shuffle_buckets),
        Seam("BaseDataset.set_current_epoch", (), _set_current_epoch),
        Seam("BaseDataset.__getitem__", (Takes("index"), Uses(*tables, *entry), Says("alpha_masks", "loss_weights"))),
        Seam(
            "ControlNetDataset.__getitem__",
            (
                Takes("index"),
                Uses(delegate, *tables),
            ),
        ),
        Seam("DatasetGroup", (Inherits("__getitem__"),)),
        Seam("DatasetGroup.__getitem__", (), _group_item),
        Seam("DatasetGroup.set_current_epoch", (Takes("epoch"),)),
    )


BATCHES = Subject("batches", "the order of an epoch", _seams, orders_epochs=True)
