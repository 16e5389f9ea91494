"""What stands in for methods of sd-scripts' dataset classes once the adapter is installed.

Each function here takes the place of the method of the same name; `dataset` is sd-scripts' own object.
"""

from __future__ import annotations

import bisect
import logging
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import ConfigError
from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.sdscripts.bucketing import BucketedImages, BucketSettings, rule_for
from kohya_bucket.sdscripts.manager import BucketManager
from kohya_bucket.sdscripts.masks import drop_unwanted_masks
from kohya_bucket.sdscripts.misread import misread_buckets
from kohya_bucket.sdscripts.objects import Dataset, Group, HeldDataset, ImageRecord, inner_of
from kohya_bucket.sdscripts.placements import bucketed, check_moves, first_placed, place_all
from kohya_bucket.sdscripts.processes import collector_paused, is_first_process
from kohya_bucket.sdscripts.settings import AdapterSettings
from kohya_bucket.sdscripts.sizes import true_size, true_sizes
from kohya_bucket.sdscripts.tables import BatchTable, KeyTable, PlannedBatch
from kohya_bucket.sdscripts.variants import at_planned_size
from kohya_bucket.sdscripts.wording import bucket_table_lines, misread_lines, skipped_lines

__all__ = [
    "get_image_size",
    "get_resolutions",
    "list_images",
    "make_buckets",
    "numbered_item",
    "planned_item",
    "set_current_epoch",
]

logger = logging.getLogger("kohya_bucket")


def get_image_size(dataset: HeldDataset, image_path: str) -> tuple[int, int]:  # noqa: ARG001
    """The stored size of one file, as Pillow decodes it; (0, 0) if it cannot be read."""
    return true_size(image_path)


def list_images(directory: str, extensions: Sequence[str]) -> list[str]:
    """The image files in one folder, sorted: what a glob per extension finds, with one look into the folder.

    As with a glob, names that begin with a dot are left out, and letter case counts where the system's paths have it.
    """
    folder = os.path.split(os.path.join(directory, "*"))[0]  # noqa: PTH118
    endings = tuple({os.path.normcase(extension) for extension in extensions})
    try:
        names = os.listdir(folder or os.curdir)  # noqa: PTH208
    except OSError:
        return []
    found = [name for name in names if not name.startswith(".") and os.path.normcase(name).endswith(endings)]
    return sorted(os.path.join(folder, name) for name in found)  # noqa: PTH118


def make_buckets(dataset: Dataset, settings: AdapterSettings, make_entry: Any) -> None:
    """Read the true sizes, place all images at once, and lay out the tables that batches are looked up in.

    Raises:
        KohyaBucketError: settings from which no buckets follow, or that exclude each other.
    """
    with collector_paused():
        images, failures = place_dataset(dataset, settings)
    manager = dataset.bucket_manager
    manager.adopt(images.buckets, KeyTable(images))
    dataset.bucket_info = images.bucket_info() if dataset.enable_bucket else None
    dataset.buckets_indices = BatchTable(images, make_entry, dataset, settings)
    dataset._length = len(dataset.buckets_indices)
    if is_first_process():
        logger.info("\n".join(bucket_table_lines(images, dataset._length)))
        if failures:
            logger.warning("\n".join(skipped_lines(failures)))


def get_resolutions(group: Group, settings: AdapterSettings) -> list[tuple[int, int]]:
    """(width, height) of every resolution that the datasets of a group train at."""
    if settings.resolutions:
        return list(settings.resolutions)
    return [(dataset.width, dataset.height) for dataset in group.datasets]


def place_dataset(dataset: Dataset, settings: AdapterSettings) -> tuple[BucketedImages, list[tuple[str, str]]]:
    """Give every image of `dataset` its bucket; take those without one out of it.

    Returns the images in their buckets, and (key, reason) of those that were taken out.
    """
    infos: list[ImageRecord] = list(dataset.image_data.values())
    sizes, unreadable = true_sizes(dataset, infos, settings.metadata_cache)
    has_own_sizes = dataset.bucket_manager is not None and dataset.enable_bucket
    keys = bucket_settings(dataset)
    check_moves(keys, settings, own_sizes=has_own_sizes)
    if not has_own_sizes:
        dataset.bucket_manager = _new_manager(dataset)
    place = dataset.bucket_manager.place
    if settings.own_buckets and dataset.enable_bucket and not has_own_sizes and not settings.resolutions:
        place = rule_for(keys, settings, sizes).place
    columns = place_all(keys, settings, sizes, place)
    placement = first_placed(columns)
    if is_first_process():
        paths = [info.absolute_path for info in infos]
        misread = misread_buckets(paths, sizes, placement, place) if len(columns) == 1 else []
        if misread:
            logger.warning("\n".join(misread_lines(misread)))
    placed = placement.placed
    failures = []
    for i in np.flatnonzero(~placed).tolist():
        info = infos[i]
        width, height = sizes[i].tolist()
        reason = unreadable.get(i) or f"{width}x{height}: {placement.reason(i).text}"
        failures.append((info.image_key, reason))
        _take_out(dataset, info)
    buckets: dict[tuple[int, int], tuple[int, int]] = {}
    pairs = map(_pairs, (sizes, placement.bucket_sizes, placement.resized_sizes))
    for keep, info, size, bucket, resized in zip(placed.tolist(), infos, *pairs, strict=True):
        if keep:
            bucket = buckets.setdefault(bucket, bucket)
            info.image_size, info.bucket_reso, info.resized_size = size, bucket, resized
    repeats = np.array([info.num_repeats for info in infos], dtype=np.int64)
    if failures:
        infos = [info for info, keep in zip(infos, placed, strict=True) if keep]
        repeats, sizes = repeats[placed], sizes[placed]
        columns = tuple(column.select(placed) for column in columns)
    names = TextColumn.of([info.image_key for info in infos])
    images = bucketed(names, repeats, columns, sizes, dataset.batch_size, keys, settings)
    if images.mode == "all":
        _count_again(dataset, infos, images)
    return images, failures


def _pairs(rows: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    return zip(rows[:, 0].tolist(), rows[:, 1].tolist(), strict=True)


def bucket_settings(dataset: Dataset) -> BucketSettings:
    """The bucket keys of one of sd-scripts' dataset objects."""
    return BucketSettings(
        (dataset.width, dataset.height),
        dataset.enable_bucket,
        dataset.min_bucket_reso,
        dataset.max_bucket_reso,
        dataset.bucket_reso_steps,
        dataset.bucket_no_upscale,
    )


def _new_manager(dataset: Dataset) -> BucketManager:
    resolution = (dataset.width, dataset.height)
    if not dataset.enable_bucket:
        manager = BucketManager(False, resolution, None, None, None)
        manager.set_predefined_resos([resolution])
        return manager
    manager = BucketManager(
        dataset.bucket_no_upscale,
        resolution,
        dataset.min_bucket_reso,
        dataset.max_bucket_reso,
        dataset.bucket_reso_steps,
    )
    if not dataset.bucket_no_upscale:
        manager.make_buckets()
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


def _count_again(dataset: Dataset, infos: list[ImageRecord], images: BucketedImages) -> None:
    """Count an image once for each resolution, in the numbers that sd-scripts prints and writes into metadata."""
    more = ((images.bucket_ids >= 0).sum(axis=1) - 1) * images.repeats
    regular = np.array([bool(info.is_reg) for info in infos], dtype=np.bool_)
    dataset.num_train_images += int(more[~regular].sum())
    dataset.num_reg_images += int(more[regular].sum())


def set_current_epoch(dataset: HeldDataset, epoch: int) -> None:
    """Note the epoch. The order of an epoch follows from its number, so nothing is shuffled here."""
    dataset.current_epoch = epoch
    inner_of(dataset).current_epoch = epoch


def planned_item(group: Group, index: PlannedBatch) -> Any:
    """The batch that `index` describes, whatever epoch and step the dataset believes it is in."""
    dataset: HeldDataset = group.datasets[index.dataset]
    set_current_epoch(dataset, index.epoch)
    owner = inner_of(dataset)
    if index.global_step is not None:
        owner.current_step = index.global_step
    keys = owner.bucket_manager.buckets[index]
    with own_random(index.seed), at_planned_size(dataset, index):
        return drop_unwanted_masks(dataset[index], keys, owner.image_to_subset)


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
