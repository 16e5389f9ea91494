"""Where anima_lora is held on to."""

from __future__ import annotations

from math import ceil
from typing import Any

from kohya_bucket.trainers.anima_lora.batches import planned_item
from kohya_bucket.trainers.anima_lora.objects import Collator, Dataset, Group, ImageRecord
from kohya_bucket.trainers.door.batches import PlannedBatch
from kohya_bucket.trainers.door.resume import RESUMING
from kohya_bucket.trainers.door.seams import Replaced, Seam, SeamGroup, calling_frame
from kohya_bucket.trainers.door.shapes import Fields, Inherits, Offers, Says, Takes, TakesAmong, Uses


def _group_item(seam: Replaced, self: Group, index: Any, /) -> Any:
    return planned_item(self, index) if isinstance(index, PlannedBatch) else seam.original(self, index)


def _make_buckets(seam: Replaced, self: Dataset, **more: Any) -> None:
    seam.original(self, **more)
    # A dataset without one full batch is empty to the trainer, which then ends.
    entry = seam.door.owners.named("BucketBatchIndex")
    self.buckets_indices = [
        entry(k, self.batch_size, i)
        for k, bucket in enumerate(self.bucket_manager.buckets)
        for i in range(ceil(len(bucket) / self.batch_size))
    ]
    self._length = len(self.buckets_indices)


def _read_file(seam: Replaced, config: dict[str, Any], /, **more: Any) -> Any:
    return seam.original(seam.door.read_options(config, calling_frame()), **more)


def _sanitize(seam: Replaced, self: Any, user_config: dict[str, Any]) -> Any:
    return seam.original(self, seam.door.read_options(user_config, calling_frame()))


_ENTRY = ("bucket_index", "bucket_batch_size", "batch_index")
_HELD = ("bucket_manager", "buckets_indices", "image_data", "image_to_subset")
_ORDER = (
    Seam("DatasetGroup", (Inherits("__getitem__", "__len__"), Offers(Group))),
    Seam("DatasetGroup.__getitem__", (), _group_item),
    Seam("DreamBoothDataset", (Offers(Dataset),)),
    Seam("ImageInfo", (Offers(ImageRecord),)),
    Seam("BucketBatchIndex", (Fields(*_ENTRY),)),
    Seam("BaseDataset.make_buckets", (Uses("bucket_manager", "buckets_indices", "batch_size", "_length"),),
         _make_buckets),
    Seam("BaseDataset.__getitem__", (Takes("index"), Uses(*_HELD, *_ENTRY))),
    Seam("BaseDataset._collate_examples", (Uses("batch_size"), Says("loss_weights"))),
    Seam("BaseDataset._load_sample", (Uses("bucket_reso", "resized_size", "latents", "latents_npz"),)),
    Seam("BaseDataset.process_caption", (Uses("current_epoch", "current_step"),)),
    Seam("collator_class", (Offers(Collator),)),
    Seam("collator_class.__call__", (Takes("examples"), Uses("current_epoch", "current_step"))),
    Seam("ConfigSanitizer.sanitize_user_config", (), _sanitize),
    Seam("_flatten_toml", (TakesAmong("d", "source", "strict"),), _read_file),
)  # fmt: skip
_RESUMING = (*RESUMING, Seam("Accelerator.skip_first_batches", (Takes("dataloader", "num_batches"),)))

SUBJECTS = (
    SeamGroup("order", "epochs are anima_lora's own", _ORDER, orders_epochs=True),
    SeamGroup("resuming", "a run that is resumed goes on by anima_lora's own count", _RESUMING),
)
