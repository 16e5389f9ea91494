"""Files, their sizes, and the bucket of each."""

from __future__ import annotations

import glob
import random
from collections.abc import Iterator
from typing import Any

from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.adapter.seams import Owners, Place, Seam, Subject
from kohya_bucket.adapter.shapes import Behaves, Uses
from kohya_bucket.sdscripts.datasets import make_buckets as own
from kohya_bucket.sdscripts.datasets.bucket_manager import BucketManager
from kohya_bucket.sdscripts.datasets.listing import list_images
from kohya_bucket.sdscripts.objects import Dataset, DelegatingDataset, Group
from kohya_bucket.sdscripts.seams.objects import has_strategies

__all__ = ["BUCKETS"]


def _glob_images(place: Place, directory: str, base: str = "*") -> list[str]:
    if base != "*" or glob.has_magic(directory):
        found: list[str] = place.original(directory, base)
        return found
    return list_images(directory, place.door.owners.named("IMAGE_EXTENSIONS"))


def _get_image_size(place: Place, self: Dataset, image_path: str) -> tuple[int, int]:
    return own.get_image_size(self, image_path)


def _size_by_cache_name(place: Place, self: Any, absolute_path: str, npz_path: str) -> tuple[Any, Any]:
    # where it is asked of an image, the cache may be another one's: its name only begins like the image's
    return place.original(self, absolute_path, npz_path) if absolute_path == npz_path else (None, None)


def _list_metadata(place: Place, self: Any, *args: Any, skip_image_resolution: Any = None, **keys: Any) -> None:
    place.original(self, *args, **keys)
    if skip_image_resolution is not None:
        self.skip_image_resolution = skip_image_resolution  # obeyed when buckets are made


def _make_buckets(place: Place, self: Dataset) -> None:
    with exit_with_message():
        own.make_buckets(self, place.door.options(), place.door.owners.named("BucketBatchIndex"))


def _make_control_buckets(place: Place, self: DelegatingDataset) -> None:
    place.original(self)
    self.num_train_images = self.dreambooth_dataset_delegate.num_train_images


def _get_resolutions(place: Place, self: Group) -> list[tuple[int, int]]:
    return own.get_resolutions(self, place.door.options())


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


def _seams(owners: Owners) -> tuple[Seam, ...]:
    return _places(owners) + (_by_strategies() if has_strategies(owners) else ())


def _by_strategies() -> tuple[Seam, ...]:
    of_cache = "LatentsCachingStrategy.get_image_size_from_disk_cache_path"
    return (
        Seam("DatasetGroup.get_resolutions", (), _get_resolutions),
        Seam(of_cache, (), _size_by_cache_name),
    )


def _places(owners: Owners) -> tuple[Seam, ...]:
    delegate = "dreambooth_dataset_delegate"
    validates = (Uses("is_training_dataset"),) if has_strategies(owners) else ()
    made = {
        "DreamBoothDataset": (validates, None),
        "FineTuningDataset": ((), _list_metadata),
        "ControlNetDataset": ((), None),
    }
    return (
        Seam("BucketManager", (Behaves(_placements),), BucketManager),
        Seam("IMAGE_EXTENSIONS"),
        Seam("glob_images", (Uses("IMAGE_EXTENSIONS"),), _glob_images),
        Seam("BaseDataset.get_image_size", (), _get_image_size),
        Seam("BaseDataset.make_buckets", (Uses(*_SWITCHES, *_TABLES),), _make_buckets),
        Seam("ControlNetDataset.make_buckets", (Uses(delegate, "buckets_indices"),), _make_control_buckets),
        *(
            Seam(f"{name}.__init__", checks, replacement, only=_DATASET_KEYS, defaults=f"{name}Params")
            for name, (checks, replacement) in made.items()
        ),
    )


BUCKETS = Subject("buckets", "files, their sizes and buckets", _seams, orders_epochs=True)
