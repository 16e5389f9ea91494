"""Every place of sd-scripts that the adapter replaces or relies on, by subject: its checks, and the replacement.

Those of caches are in `cache_seams.py`.
"""

from __future__ import annotations

import glob
import random
from collections.abc import Iterator
from typing import Any

from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.adapter.door import Place, Seam, Subject, calling_frame, where
from kohya_bucket.adapter.resume import Accelerator
from kohya_bucket.adapter.shapes import Behaves, Check, Fields, Inherits, Offers, Says, Takes, TakesAmong, Uses
from kohya_bucket.errors import ConfigError
from kohya_bucket.sdscripts import objects
from kohya_bucket.sdscripts.batches import note_epoch, numbered_item, planned_item
from kohya_bucket.sdscripts.bucket_manager import BucketManager
from kohya_bucket.sdscripts.cache_seams import CACHING, TEXT_CACHING, has_no_strategies, has_strategies
from kohya_bucket.sdscripts.config.files import read_folder
from kohya_bucket.sdscripts.config.model import CONTROL_IN_THE_MIDDLE
from kohya_bucket.sdscripts.make_buckets import get_image_size, get_resolutions, make_buckets
from kohya_bucket.sdscripts.objects import Dataset, DelegatingDataset, Group
from kohya_bucket.sdscripts.resuming import is_known
from kohya_bucket.sdscripts.tables import BatchTable

_ENTRY = ("bucket_index", "bucket_batch_size", "batch_index")

OBJECTS = Subject(
    "objects",
    "image records, subsets and data sets",
    (
        *where(has_strategies, Seam("ImageInfo", (Offers(objects.CachedRecord),))),
        *where(has_no_strategies, Seam("ImageInfo", (Offers(objects.ImageRecord),))),
        Seam("BucketBatchIndex", (Fields(*_ENTRY),)),
        Seam("DreamBoothSubset", (Offers(objects.NotedSubset),)),
        Seam("FineTuningSubset", (Offers(objects.ListedSubset),)),
        Seam("ControlNetSubset", (Offers(objects.NotedSubset),)),
        Seam("DreamBoothDataset", (Offers(objects.Dataset),)),
        Seam("FineTuningDataset", (Offers(objects.Dataset),)),
        Seam("ControlNetDataset", (Offers(objects.DelegatingDataset),)),
        Seam("DatasetGroup", (Offers(objects.Group),)),
        Seam("collator_class", (Offers(objects.Collator),)),
        Seam("BaseDataset.__getitem__", (Uses("image_data", "image_to_subset", "bucket_reso", "resized_size"),)),
    ),
    orders_epochs=True,
)


# Files, their sizes, and the bucket of each.


def _glob_images(place: Place, directory: str, base: str = "*") -> list[str]:
    if base != "*" or glob.has_magic(directory):
        found: list[str] = place.original(directory, base)
        return found
    try:
        return read_folder(directory, place.door.owners.named("IMAGE_EXTENSIONS")).images
    except OSError:
        return []


def _size_by_cache_name(place: Place, self: Any, absolute_path: str, npz_path: str) -> tuple[Any, Any]:
    # where it is asked of an image, the cache may be another one's: its name only begins like the image's
    return place.original(self, absolute_path, npz_path) if absolute_path == npz_path else (None, None)


def _list_metadata(place: Place, self: Any, *args: Any, skip_image_resolution: Any = None, **keys: Any) -> None:
    place.original(self, *args, **keys)
    if skip_image_resolution is not None:
        self.skip_image_resolution = skip_image_resolution  # obeyed when buckets are made


def _make_control_buckets(place: Place, self: DelegatingDataset) -> None:
    if place.door.options().focus and Uses("trim_and_resize_if_required")(
        place.door.owners.find("ControlNetDataset.__getitem__")[2]
    ):
        raise ConfigError(CONTROL_IN_THE_MIDDLE)
    place.original(self)
    self.num_train_images = self.dreambooth_dataset_delegate.num_train_images


def _placements(theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    """Images that sd-scripts places without a mistake: none is so small or narrow that a side becomes 0."""
    draw = random.Random(0)
    sizes = [(draw.randint(256, 2048), draw.randint(256, 2048)) for _ in range(120)]
    for no_upscale, resolution, steps in ((False, (1024, 1024), 64), (True, (1024, 1024), 64), (True, (512, 768), 32)):
        asked, ours = (cls(no_upscale, resolution, 256, 2048, steps) for cls in (theirs, BucketManager))
        if not no_upscale:
            asked.make_buckets()
            ours.make_buckets()
        placed = ours.place(sizes)
        expected = zip(placed.bucket_sizes.tolist(), placed.resized_sizes.tolist(), strict=True)
        how = f"{resolution[0]}x{resolution[1]} in steps of {steps}{', no_upscale' if no_upscale else ''}"
        for (width, height), (bucket, resized) in zip(sizes, expected, strict=True):
            answer = asked.select_bucket(width, height)[:2]
            yield f"{width}x{height} at {how}", tuple(map(tuple, answer)), (tuple(bucket), tuple(resized))


_SWITCHES = ("image_data", "enable_bucket", "bucket_no_upscale")
_TABLES = ("bucket_manager", "bucket_info", "buckets_indices", "batch_size", "_length")
_DATASET_KEYS = (
    "subsets", "is_training_dataset", "batch_size", "tokenizer", "max_token_length", "resolution", "network_multiplier",
    "enable_bucket", "min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale",
    "prior_loss_weight", "train_inpainting", "debug_dataset", "validation_split", "validation_seed",
    "resize_interpolation", "skip_image_resolution",
)  # fmt: skip
_OF_CACHE = "LatentsCachingStrategy.get_image_size_from_disk_cache_path"
_DELEGATE = "dreambooth_dataset_delegate"


def _made(name: str, checks: tuple[Check, ...] = (), replacement: Any = None) -> Seam:
    """Where data sets of a kind are made, from keys whose consequences are known."""
    return Seam(f"{name}.__init__", checks, replacement, only=_DATASET_KEYS, defaults=f"{name}Params")


BUCKETS = Subject(
    "buckets",
    "files, their sizes and buckets",
    (
        Seam("BucketManager", (Behaves(_placements),), BucketManager),
        Seam("IMAGE_EXTENSIONS"),
        Seam("glob_images", (Uses("IMAGE_EXTENSIONS"),), _glob_images),
        Seam("BaseDataset.get_image_size", (), get_image_size),
        Seam("BaseDataset.make_buckets", (Uses(*_SWITCHES, *_TABLES),), make_buckets),
        Seam("ControlNetDataset.make_buckets", (Uses(_DELEGATE, "buckets_indices"),), _make_control_buckets),
        *where(has_no_strategies, _made("DreamBoothDataset")),
        *where(has_strategies, _made("DreamBoothDataset", (Uses("is_training_dataset"),))),
        _made("FineTuningDataset", (), _list_metadata),
        _made("ControlNetDataset"),
        *where(
            has_strategies,
            Seam("DatasetGroup.get_resolutions", (), get_resolutions),
            Seam(_OF_CACHE, (), _size_by_cache_name),
        ),
    ),
    orders_epochs=True,
)


# The order of an epoch, and the batch at a place in it.


def _shuffle_buckets(place: Place, self: Dataset) -> None:
    if not isinstance(self.buckets_indices, BatchTable):
        place.original(self)


def _set_current_epoch(place: Place, self: Dataset, epoch: int) -> None:
    note_epoch(self, epoch)


def _group_item(place: Place, self: Group, index: int, /) -> Any:
    if isinstance(index, PlannedBatch):
        return planned_item(self, index)
    tables = [getattr(dataset, "buckets_indices", None) for dataset in self.datasets]
    if all(isinstance(table, BatchTable) and table.options.several_sizes for table in tables):
        return numbered_item(self, index)
    return place.original(self, index)


_HELD = ("bucket_manager", "buckets", "buckets_indices")

BATCHES = Subject(
    "batches",
    "the order of an epoch",
    (
        Seam("BaseDataset.shuffle_buckets", (), _shuffle_buckets),
        Seam("BaseDataset.set_current_epoch", (), _set_current_epoch),
        Seam("BaseDataset.__getitem__", (Takes("index"), Uses(*_HELD, *_ENTRY), Says("alpha_masks", "loss_weights"))),
        Seam("ControlNetDataset.__getitem__", (Takes("index"), Uses(_DELEGATE, *_HELD))),
        Seam("DatasetGroup", (Inherits("__getitem__"),)),
        Seam("DatasetGroup.__getitem__", (), _group_item),
        Seam("DatasetGroup.set_current_epoch", (Takes("epoch"),)),
    ),
    orders_epochs=True,
)


# The dataset config, in which the adapter's own table stands.


def _sanitize_user_config(place: Place, self: Any, user_config: dict[str, Any], **more: Any) -> dict[str, Any]:
    result: dict[str, Any] = place.original(self, place.door.read_options(user_config), **more)
    return result


CONFIG = Subject(
    "config",
    "the dataset config",
    (Seam("ConfigSanitizer.sanitize_user_config", (), _sanitize_user_config),),
    orders_epochs=True,
)


# The loader over a data set group, and the collator that tells the epoch.


_ARGUMENTS = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "collate_fn")

LOADING = Subject(
    "loading",
    "the loader of a data set group",
    (
        Seam("collator_class.__init__", (Takes("epoch", "step", "dataset"),)),
        Seam(
            "collator_class.__call__",
            (Takes("examples"), Uses("current_epoch", "current_step", "set_current_epoch", "set_current_step")),
        ),
        Seam("DataLoader.__init__", (TakesAmong(*_ARGUMENTS, "num_workers", "worker_init_fn", "generator"),)),
    ),
    orders_epochs=True,
)


# The accelerator, whose states remember the place in an epoch.


def _prepare_accelerator(place: Place, args: Any, **more: Any) -> Any:
    resume = place.door.resume
    resume.take_arguments(args, counts=is_known(args, calling_frame()))
    accelerator: Accelerator = place.original(args, **more)
    resume.watch(accelerator)
    return accelerator


RESUMING = Subject(
    "resuming",
    "a run that is resumed goes on by sd-scripts' own count",
    (
        Seam("prepare_accelerator", (), _prepare_accelerator),
        Seam("Accelerator", (Offers(Accelerator),)),
        Seam("Accelerator.skip_first_batches", (Takes("dataloader", "num_batches"),)),
    ),
)


SUBJECTS = (OBJECTS, BUCKETS, BATCHES, CONFIG, LOADING, CACHING, TEXT_CACHING, RESUMING)
