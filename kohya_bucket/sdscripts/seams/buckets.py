"""Files, their sizes, and the bucket of each."""

from __future__ import annotations

import functools
import glob
import inspect
from typing import Any

from kohya_bucket.adapter.messages import exit_with_message
from kohya_bucket.adapter.seams import Door, Owners, Seam, Subject
from kohya_bucket.adapter.shapes import CoveredBy, Takes, TakesAmong, Uses
from kohya_bucket.sdscripts.datasets import make_buckets as own
from kohya_bucket.sdscripts.datasets.bucket_manager import BucketManager
from kohya_bucket.sdscripts.datasets.listing import list_images
from kohya_bucket.sdscripts.objects import Dataset, DelegatingDataset, Group
from kohya_bucket.sdscripts.seams.objects import has_strategies

__all__ = ["BUCKETS"]


def _bucket_manager(_: Any, door: Door) -> Any:
    return BucketManager


def _glob_images(original: Any, door: Door) -> Any:
    extensions = door.owners.named("IMAGE_EXTENSIONS")

    @functools.wraps(original)
    def glob_images(directory: str, base: str = "*") -> list[str]:
        if base != "*" or glob.has_magic(directory):
            found: list[str] = original(directory, base)
            return found
        return list_images(directory, extensions)

    return glob_images


def _get_image_size(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def get_image_size(self: Dataset, image_path: str) -> tuple[int, int]:
        return own.get_image_size(self, image_path)

    return get_image_size


def _size_by_cache_name(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def get_image_size_from_disk_cache_path(self: Any, absolute_path: str, npz_path: str) -> tuple[Any, Any]:
        # where it is asked of an image, the cache may be another one's: its name only begins like the image's
        return original(self, absolute_path, npz_path) if absolute_path == npz_path else (None, None)

    return get_image_size_from_disk_cache_path


def _list_metadata(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **keys: Any) -> None:
        limit = keys.pop(_SKIP, None)
        original(self, *args, **keys)
        if limit is not None:
            self.skip_image_resolution = limit  # obeyed when buckets are made

    return init


def _make_buckets(original: Any, door: Door) -> Any:
    make_entry = door.owners.named("BucketBatchIndex")

    @functools.wraps(original)
    def make_buckets(self: Dataset) -> None:
        with exit_with_message():
            own.make_buckets(self, door.options(), make_entry)

    return make_buckets


def _make_control_buckets(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def make_buckets(self: DelegatingDataset) -> None:
        original(self)
        self.num_train_images = self.dreambooth_dataset_delegate.num_train_images

    return make_buckets


def _get_resolutions(original: Any, door: Door) -> Any:
    @functools.wraps(original)
    def get_resolutions(self: Group) -> list[tuple[int, int]]:
        return own.get_resolutions(self, door.options())

    return get_resolutions


_SKIP = "skip_image_resolution"
_LIMITS = ("no_upscale", "max_reso", "min_size", "max_size", "reso_steps")
_SWITCHES = ("image_data", "enable_bucket", "bucket_no_upscale")
_TABLES = ("bucket_manager", "bucket_info", "buckets_indices", "batch_size", "_length")


def _seams(owners: Owners) -> tuple[Seam, ...]:
    return _places() + (_by_strategies() if has_strategies(owners) else ()) + (_skipping() if _skips(owners) else ())


def _skips(owners: Owners) -> bool:
    """Whether small images can be left out (since 0.10.2): the only thing that this class need not be told."""
    init = owners.find("FineTuningDataset.__init__")[2]
    return callable(init) and any(p.default is not p.empty for p in inspect.signature(init).parameters.values())


def _skipping() -> tuple[Seam, ...]:
    return (Seam("FineTuningDataset.__init__", (TakesAmong(_SKIP), Uses(_SKIP)), _list_metadata),)


def _by_strategies() -> tuple[Seam, ...]:
    of_cache = "LatentsCachingStrategy.get_image_size_from_disk_cache_path"
    return (
        Seam("DatasetGroup.get_resolutions", (Takes(),), _get_resolutions),
        Seam("DreamBoothDataset.__init__", (Uses("is_training_dataset"),)),
        Seam(of_cache, (Takes("absolute_path", "npz_path"),), _size_by_cache_name),
    )


def _places() -> tuple[Seam, ...]:
    return (
        Seam("BucketManager", (CoveredBy(BucketManager),), _bucket_manager),
        Seam("BucketManager.__init__", (Takes(*_LIMITS),)),
        Seam("BucketManager.select_bucket", (Takes("image_width", "image_height"),)),
        Seam("BucketManager.get_crop_ltrb", (Takes("bucket_reso", "image_size"),)),
        Seam("IMAGE_EXTENSIONS"),
        Seam("glob_images", (Takes("directory", "base"), Uses("IMAGE_EXTENSIONS")), _glob_images),
        Seam("BaseDataset.get_image_size", (Takes("image_path"),), _get_image_size),
        Seam("BaseDataset.make_buckets", (Takes(), Uses(*_SWITCHES, *_TABLES)), _make_buckets),
        Seam(
            "ControlNetDataset.make_buckets",
            (Takes(), Uses("dreambooth_dataset_delegate", "buckets_indices")),
            _make_control_buckets,
        ),
    )


BUCKETS = Subject("buckets", "files, their sizes and buckets", _seams, orders_epochs=True)
