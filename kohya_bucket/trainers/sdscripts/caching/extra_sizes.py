"""Images at other sizes than their own bucket's: what sd-scripts is shown in place of an image, and caches besides.

sd-scripts keeps one bucket and one set of cached latents for each image. Where the plan trains an image elsewhere
(remainders `merge` and `catch_all`, `resolutions`), the batch is made from copies of its entries with another size,
and with the latents that were cached for that size.
"""

from __future__ import annotations

import copy
import logging
from collections import ChainMap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kohya_bucket.buckets.sizes import Size, as_pair
from kohya_bucket.checks import is_first_process
from kohya_bucket.datasets.agreement import world
from kohya_bucket.errors import ConfigError, LatentStoreError
from kohya_bucket.trainers.door.batches import PlannedBatch
from kohya_bucket.trainers.door.group import moved_images
from kohya_bucket.trainers.door.placed import PlacedDataset
from kohya_bucket.trainers.sdscripts.carried import ResizedSize
from kohya_bucket.trainers.sdscripts.carried import SizedPath as SizedPath
from kohya_bucket.trainers.sdscripts.objects import Dataset, HeldDataset, ImageRecord, inner_of
from kohya_bucket.trainers.sdscripts.tables import BatchTable

_SLOTS = ("latents", "latents_flipped", "latents_npz", "latents_original_size", "latents_crop_ltrb", "alpha_mask")
_KEPT = "kohya_bucket_variants"  # attribute of a dataset: {(image key, size): cached latents}, see `_SLOTS`

logger = logging.getLogger("kohya_bucket")


@dataclass(frozen=True)
class _Variant:
    info: ImageRecord
    size: Size
    resized: Size

    def entry(self) -> Any:
        """A copy of the image's entry at this size, nothing cached."""
        entry = copy.copy(self.info)
        entry.bucket_reso, entry.resized_size = self.size, self.resized
        for slot in _SLOTS:
            if hasattr(entry, slot):
                setattr(entry, slot, None)
        return entry


@contextmanager
def at_planned_size(dataset: HeldDataset, index: PlannedBatch) -> Iterator[None]:
    """While a batch is made, its images have the size that the plan trains them at.

    Raises:
        LatentStoreError: latents are cached, but not for that size.
    """
    owner = inner_of(dataset)
    images, records = dataset.buckets_indices.images, owner.image_data
    shown: dict[str, Any] = {}
    for i, key in zip(index.images.tolist(), owner.bucket_manager.buckets[index], strict=True):
        info = records[key]
        size, resized = _size_at(images, i, index.bucket, info)
        if tuple(info.bucket_reso) != size:
            shown[key] = _with_latents(_Variant(info, size, resized), getattr(owner, _KEPT, {}))
    owner.image_data = ChainMap(shown, records) if shown else records
    try:
        yield
    finally:
        owner.image_data = records


def _size_at(images: PlacedDataset, image: int, bucket: int, info: ImageRecord) -> tuple[Size, Size]:
    """(bucket, resized size) of an image in any bucket."""
    placement = images.placed_at(image, bucket)
    (resized,) = ResizedSize.from_placement(placement, getattr(info.resized_size, "is_stated", False))
    return as_pair(placement.bucket_sizes[0]), resized


def _with_latents(variant: _Variant, cached: Mapping[tuple[str, Size], Mapping[str, Any]]) -> Any:
    entry, info = variant.entry(), variant.info
    if info.latents is None and info.latents_npz is None:
        return entry
    kept = cached.get((info.image_key, variant.size))
    if kept is None:
        width, height = variant.size
        raise LatentStoreError(f"{info.absolute_path} has no cached latents at {width}x{height}: start the run again")
    for slot, value in kept.items():
        setattr(entry, slot, value)
    return entry


@contextmanager
def caching_all_sizes(dataset: Dataset) -> Iterator[None]:
    """While sd-scripts caches latents, its images are joined by entries for all other sizes that they train at.

    Raises:
        ConfigError: latents that were made beforehand.
    """
    variants = _variants(dataset)
    if not variants:
        yield
        return
    ready = [v.info.absolute_path for v in variants if v.info.latents_npz is not None]
    if ready:
        raise ConfigError(
            f"[kohya_bucket] trains images at several sizes, but {len(ready)} come with latents of one size made "
            f"beforehand, {ready[0]} first: train from the images, or leave resolutions and remainder = 'merge' or "
            "'catch_all' out"
        )
    # sd-scripts caches by record and path: each further size is a record of its own, whose path says the size.
    entries = [variant.entry() for variant in variants]
    for entry, variant in zip(entries, variants, strict=True):
        path = SizedPath(entry.absolute_path)
        path.bucket = variant.size
        entry.absolute_path = path
    if is_first_process():
        images = len({id(v.info) for v in variants})
        logger.info("%d images are cached at other sizes too, %d latents more", images, len(variants))
    records = dataset.image_data
    dataset.image_data = {**records, **{(v.info.image_key, v.size): e for v, e in zip(variants, entries, strict=True)}}
    try:
        yield
    finally:
        dataset.image_data = records
    # What was cached goes with the dataset, by image and size; `at_planned_size` takes it up.
    kept = {}
    for entry, variant in zip(entries, variants, strict=True):
        latents = {slot: getattr(entry, slot, None) for slot in _SLOTS}
        kept[variant.info.image_key, variant.size] = {slot: v for slot, v in latents.items() if v is not None}
    setattr(dataset, _KEPT, kept)


def _variants(dataset: Dataset) -> list[_Variant]:
    """Every size besides its own at which an image may be trained in any epoch."""
    table = dataset.buckets_indices
    if not isinstance(table, BatchTable) or not table.options.several_sizes:
        return []
    images = table.images
    variants: list[_Variant] = []
    for members, buckets in (images.pairs, moved_images(images, table.options, [world()[0]])):
        for i, k in zip(members.tolist(), buckets.tolist(), strict=True):
            info: ImageRecord = dataset.image_data[images.keys[i]]
            size, resized = _size_at(images, i, k, info)
            if tuple(info.bucket_reso) != size:
                variants.append(_Variant(info, size, resized))
    return variants
