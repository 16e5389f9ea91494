"""Replacements for methods of sd-scripts' dataset classes: the public functions, for methods of the same names."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import is_first_process
from kohya_bucket.images import SizeScan, read_sizes
from kohya_bucket.texts import one_line
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import PlacedDataset
from kohya_bucket.trainers.door.ranks import collector_paused
from kohya_bucket.trainers.door.seams import Replaced
from kohya_bucket.trainers.sdscripts.carried import ResizedSize
from kohya_bucket.trainers.sdscripts.dataset_images import (
    CACHE_FILE,
    DatasetTable,
    are_stated_truly,
    image_named,
    refuse_random_crops,
    skipped_images,
    supported_extensions,
    written_ns,
)
from kohya_bucket.trainers.sdscripts.objects import Dataset, Group, HeldDataset, ImageRecord, Subset
from kohya_bucket.trainers.sdscripts.tables import BatchTable, KeyTable
from kohya_bucket.trainers.sdscripts.wording import bucket_table_lines, rule_text, skipped_lines

logger = logging.getLogger("kohya_bucket")


def get_image_size(seam: Replaced, self: HeldDataset, image_path: str) -> tuple[int, int]:  # noqa: ARG001
    """The stored size of one file, as Pillow decodes it; (0, 0) if it cannot be read.

    sd-scripts asks before buckets are made where small images are to be skipped, and skips what has no size.
    """
    scan = read_sizes([image_path])
    for _, path, reason in scan.failures if is_first_process() else ():
        logger.warning("%s", one_line(f"{path}: {reason}"))
    width, height = scan.sizes[0].tolist()
    return width, height


def make_buckets(seam: Replaced, self: Dataset) -> None:
    """Read the true sizes, place all images at once, and lay out the tables that batches are looked up in.

    Raises:
        KohyaBucketError: options from which no buckets follow, or that exclude each other.
    """
    dataset, options = self, seam.door.options()
    refuse_random_crops(getattr(dataset, "subsets", ()), options)
    with collector_paused():
        images, failures = _place(dataset, options)
    dataset.bucket_manager = _manager_of(images, dataset, seam.door.owners.named("BucketManager"))
    dataset.bucket_info = bucket_info(images) if dataset.enable_bucket else None
    dataset.buckets_indices = BatchTable(images, seam.door.owners.named("BucketBatchIndex"), dataset, options)
    dataset._length = len(dataset.buckets_indices)
    if is_first_process():
        if len(images.keys):
            rule = rule_text(images, options, enable_bucket=dataset.enable_bucket)
            logger.info("\n".join(bucket_table_lines(images, dataset.buckets_indices.counts, rule)))
        if failures:
            logger.warning("\n".join(skipped_lines(failures)))


def get_resolutions(seam: Replaced, self: Group) -> list[tuple[int, int]]:
    """(width, height) of every resolution that the datasets of a group train at."""
    return list(seam.door.options().resolutions or ((dataset.width, dataset.height) for dataset in self.datasets))


def _place(dataset: Dataset, options: AdapterOptions) -> tuple[PlacedDataset, list[tuple[str, str]]]:
    """Give every image of `dataset` its bucket; take those without one out of it.

    Returns the images in their buckets, and (key, reason) of those that were taken out.
    """
    # Sizes that may be trusted as they are, and the headers' for all others: one row for each image.
    infos: list[ImageRecord] = list(dataset.image_data.values())
    table = table_of(dataset, infos)
    scan = table.sizes(options.metadata_cache)
    if not scan.read.all():  # it was interrupted
        raise KeyboardInterrupt
    # What skip_image_resolution leaves out goes from sd-scripts' tables too: below, all rows are of images to place.
    kept = _large_enough(dataset, table, scan)
    if len(kept) < len(infos):
        for i in sorted(set(range(len(infos))) - set(kept)):
            _take_out(dataset, infos[i])
        infos, table, scan = [infos[i] for i in kept], table.select(kept), scan.select(kept)
    placing = table.place(scan, dataset.batch_size, _keys_of(dataset, options), options)
    placement = placing.placement
    # Each record gets its place; those of one bucket share one tuple, since there may be millions.
    buckets: dict[tuple[int, int], tuple[int, int]] = {}
    is_stated = table.stated_sizes.any(axis=1) & _is_listed(dataset, table)
    resized_sizes = ResizedSize.from_placement(placement, is_stated)
    pairs = map(_pairs, (scan.sizes, placement.bucket_sizes))
    columns = zip(placement.placed.tolist(), infos, *pairs, resized_sizes, strict=True)
    for is_placed, info, size, bucket, resized in columns:
        if is_placed:
            bucket = buckets.setdefault(bucket, bucket)
            info.image_size, info.bucket_reso, info.resized_size = size, bucket, resized
    for i, _ in placing.left_out:
        _take_out(dataset, infos[i])
    if placing.trained.mode == "all":
        # sd-scripts prints these counts and writes them into metadata: there an image counts once per resolution.
        uncounted = ((placing.trained.bucket_ids >= 0).sum(axis=1) - 1) * placing.trained.repeats
        is_reg = table.is_reg[placement.placed]
        dataset.num_train_images += int(uncounted[~is_reg].sum())
        dataset.num_reg_images += int(uncounted[is_reg].sum())
    return placing.trained, [(table.keys[i], reason) for i, reason in placing.left_out]


def _large_enough(dataset: Dataset, table: DatasetTable, scan: SizeScan) -> Sequence[int]:
    """The rows of metadata that `skip_image_resolution` does not leave out; it is obeyed here.

    sd-scripts itself goes by caches whose names begin like an image's, and counts what it leaves out.
    """
    limit = getattr(dataset, "skip_image_resolution", None)
    if limit is None or not _is_listed(dataset, table):
        return range(len(table))
    skips = skipped_images(table.paths, list(_pairs(scan.sizes)), limit)
    if skips.reasons and is_first_process():
        logger.info("%s of %s images left out by skip_image_resolution", len(skips.reasons), len(table))
        names = [(table.keys[i], reason) for i, reason in scan.unreadable.items() if i in skips.reasons]
        if names:
            logger.warning("\n".join(skipped_lines(names)))
    return [i for i in range(len(table)) if i not in skips.reasons]


def _is_listed(dataset: Dataset, table: DatasetTable) -> bool:
    """Whether metadata lists the images, and may state their sizes."""
    return all(hasattr(dataset.image_to_subset[key], "metadata_file") for key in table.keys)


def _pairs(rows: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    return zip(rows[:, 0].tolist(), rows[:, 1].tolist(), strict=True)


def _keys_of(dataset: Dataset, options: AdapterOptions) -> DatasetKeys:
    """The bucket keys of one of sd-scripts' dataset objects.

    Some versions have no limits where none are obeyed, with `bucket_no_upscale`: then the usual ones, as far as the
    resolutions lie within them.
    """
    size, low, high = (dataset.width, dataset.height), dataset.min_bucket_reso, dataset.max_bucket_reso
    sides = [side for resolution in (size, *(options.resolutions or ())) for side in resolution]
    low = min(DatasetKeys.min_bucket_reso, *sides) if low is None else low
    high = max(DatasetKeys.max_bucket_reso, *sides) if high is None else high
    steps, no_upscale = dataset.bucket_reso_steps, dataset.bucket_no_upscale
    return DatasetKeys(size, dataset.enable_bucket, low, high, steps, no_upscale)


def _manager_of(images: PlacedDataset, dataset: Dataset, manager_type: Any) -> Any:
    """sd-scripts' own manager with finished buckets, one for each size."""
    limits = dataset.min_bucket_reso, dataset.max_bucket_reso, dataset.bucket_reso_steps
    manager = manager_type(dataset.bucket_no_upscale, (dataset.width, dataset.height), *limits)
    manager.resos, manager.buckets = images.buckets, KeyTable(images)
    manager.reso_to_id = {size: i for i, size in enumerate(images.buckets)}
    return manager


def _take_out(dataset: Dataset, info: ImageRecord) -> None:
    """Remove an image, and correct the counts that sd-scripts prints and writes into metadata."""
    subset = dataset.image_to_subset.pop(info.image_key, None)
    del dataset.image_data[info.image_key]
    if info.is_reg:
        dataset.num_reg_images -= info.num_repeats
    else:
        dataset.num_train_images -= info.num_repeats
    if subset is not None and subset.img_count > 0:
        subset.img_count -= 1


# Sizes that sd-scripts took from the *names* of cached latents match by prefix there: `img_1.png` takes the
# size of `img_10_0300x0200_sd.npz`. Sizes of WebP files in its `metadata_cache.json` may be one pixel short, and
# images may have been edited since. All these are read again from the image's header, which is faster than the
# doubt is worth. In fine-tuning sets such a cache also takes the image's place; it is put back, since latents are
# checked against the image that they were made from.


_CACHE_NAME = re.compile(r"(?P<stem>.*)_\d{4,}x\d{4,}(_[a-z0-9]+)?\.npz", re.IGNORECASE | re.DOTALL)


def table_of(dataset: Dataset, infos: Sequence[ImageRecord]) -> DatasetTable:
    """Images of one of sd-scripts' own datasets, with the sizes that it knows and may be trusted with."""
    # Sizes in metadata count; those in a `metadata_cache.json` where they are to be believed.
    sizes = np.zeros((len(infos), 2), dtype=np.int32)
    noted = []
    subsets = [dataset.image_to_subset[info.image_key] for info in infos]
    for i, (info, subset) in enumerate(zip(infos, subsets, strict=True)):
        _put_image_back(info, subset)
        if info.image_size is not None and hasattr(subset, "metadata_file"):
            sizes[i] = info.image_size
        elif info.image_size is not None and getattr(subset, "cache_info", False):
            noted.append(i)
    written = {folder: written_ns(os.path.join(folder, CACHE_FILE)) for folder in {_folder(subsets[i]) for i in noted}}  # noqa: PTH118
    are_true = are_stated_truly([infos[i].absolute_path for i in noted], [written[_folder(subsets[i])] for i in noted])
    for i, is_true in zip(noted, are_true, strict=True):
        if is_true:
            sizes[i] = infos[i].image_size or (0, 0)
    numbers: dict[int, int] = {}
    return DatasetTable(
        keys=tuple(info.image_key for info in infos),
        paths=tuple(info.absolute_path for info in infos),
        stated_sizes=sizes,
        repeats=np.array([info.num_repeats for info in infos], dtype=np.int64),
        is_reg=np.array([info.is_reg for info in infos], dtype=np.bool_),
        subset=np.array([numbers.setdefault(id(s), len(numbers) + 1) for s in subsets], dtype=np.int32),
    )


def _folder(subset: Subset) -> str:
    return subset.image_dir or ""


def _put_image_back(info: ImageRecord, subset: Subset) -> None:
    """Fine-tuning sets: where metadata has no size, a cache with a name like the image's stands for the image.

    If its name only begins like the image's, it is another image's. If the image itself is gone, its own cache still
    knows the size.
    """
    path = info.absolute_path
    if path == info.image_key or not path.lower().endswith(".npz"):
        return
    match = _CACHE_NAME.fullmatch(PurePath(path).name)
    if match is None:
        return
    image = os.path.join(_folder(subset), info.image_key)  # noqa: PTH118
    # since 0.10.6 a key need not have an extension
    info.absolute_path = image if os.path.isfile(image) else image_named(image) or image  # noqa: PTH113
    if match["stem"] != _stem(info.image_key) or os.path.exists(info.absolute_path):  # noqa: PTH110
        info.image_size = None
        info.latents_npz = None  # since 0.11.1 that cache would be trained from without a look at it


def _stem(key: str) -> str:
    """How caches of an image begin, whose key has an extension or none."""
    path = PurePath(key)
    return path.stem if path.suffix in supported_extensions() else path.name


def bucket_info(images: PlacedDataset) -> dict[str, Any]:
    """What sd-scripts writes into a LoRA's metadata as `bucket_info`, equal to the last digit."""
    placements = images.placements
    errors = np.concatenate([placement.aspect_errors[placement.placed] for placement in placements])
    return {
        "buckets": {
            i: {"resolution": size, "count": int(count)}
            for i, (size, count) in enumerate(zip(images.buckets, images.samples_per_bucket, strict=True))
            if count > 0
        },
        "mean_img_ar_error": np.mean(np.abs(errors)) if len(errors) else 0,
    }
