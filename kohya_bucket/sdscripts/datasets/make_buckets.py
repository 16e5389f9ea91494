"""What stands in for methods of sd-scripts' dataset classes once the adapter is installed.

Each function here takes the place of the method of the same name; `dataset` is sd-scripts' own object.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.dataset_keys import DatasetKeys
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.placed import PlacedDataset
from kohya_bucket.adapter.placing import place_images
from kohya_bucket.adapter.ranks import collector_paused, is_first_process
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.images import read_sizes
from kohya_bucket.sdscripts.config.skipping import skipped_images
from kohya_bucket.sdscripts.datasets.bucket_manager import BucketManager
from kohya_bucket.sdscripts.datasets.misread import misread_buckets
from kohya_bucket.sdscripts.datasets.tables import BatchTable, KeyTable
from kohya_bucket.sdscripts.datasets.true_sizes import true_sizes
from kohya_bucket.sdscripts.datasets.wording import bucket_table_lines, misread_lines, rule_text, skipped_lines
from kohya_bucket.sdscripts.objects import Dataset, Group, HeldDataset, ImageRecord
from kohya_bucket.texts import one_line

__all__ = ["get_image_size", "get_resolutions", "make_buckets"]

logger = logging.getLogger("kohya_bucket")


def get_image_size(dataset: HeldDataset, image_path: str) -> tuple[int, int]:  # noqa: ARG001
    """The stored size of one file, as Pillow decodes it; (0, 0) if it cannot be read.

    sd-scripts asks before buckets are made where small images are to be skipped, and skips what has no size.
    """
    scan = read_sizes([image_path])
    for _, path, reason in scan.failures if is_first_process() else ():
        logger.warning("%s", one_line(f"{path}: {reason}"))
    width, height = scan.sizes[0].tolist()
    return width, height


def make_buckets(dataset: Dataset, options: AdapterOptions, make_entry: Any) -> None:
    """Read the true sizes, place all images at once, and lay out the tables that batches are looked up in.

    Raises:
        KohyaBucketError: options from which no buckets follow, or that exclude each other.
    """
    prescribed = _has_own_sizes(dataset)
    with collector_paused():
        images, failures = place_dataset(dataset, options)
    manager = dataset.bucket_manager
    manager.adopt(images.buckets, KeyTable(images))
    dataset.bucket_info = images.bucket_info() if dataset.enable_bucket else None
    dataset.buckets_indices = BatchTable(images, make_entry, dataset, options)
    dataset._length = len(dataset.buckets_indices)
    if is_first_process():
        if len(images.keys):
            rule = rule_text(images, options, enable_bucket=dataset.enable_bucket, prescribed=prescribed)
            logger.info("\n".join(bucket_table_lines(images, dataset._length, rule)))
        if failures:
            logger.warning("\n".join(skipped_lines(failures)))


def get_resolutions(group: Group, options: AdapterOptions) -> list[tuple[int, int]]:
    """(width, height) of every resolution that the datasets of a group train at."""
    if options.resolutions:
        return list(options.resolutions)
    return [(dataset.width, dataset.height) for dataset in group.datasets]


def place_dataset(dataset: Dataset, options: AdapterOptions) -> tuple[PlacedDataset, list[tuple[str, str]]]:
    """Give every image of `dataset` its bucket; take those without one out of it.

    Returns the images in their buckets, and (key, reason) of those that were taken out.
    """
    infos: list[ImageRecord] = list(dataset.image_data.values())
    sizes, unreadable = true_sizes(dataset, infos, options.metadata_cache)
    infos, sizes, unreadable = _large_enough(dataset, infos, sizes, unreadable)
    has_own_sizes = _has_own_sizes(dataset)
    if not has_own_sizes:
        dataset.bucket_manager = _new_manager(dataset)
    names = [info.image_key for info in infos]
    repeats = np.array([info.num_repeats for info in infos], dtype=np.int64)
    placing = place_images(
        names, sizes, repeats, dataset.batch_size, dataset_keys(dataset, options), options,
        unreadable=unreadable, prescribed=dataset.bucket_manager.place if has_own_sizes else None,
    )  # fmt: skip
    placement = placing.placement
    if is_first_process() and placing.place is not None:
        misread = misread_buckets([info.absolute_path for info in infos], sizes, placement, placing.place)
        if misread:
            logger.warning("\n".join(misread_lines(misread)))
    buckets: dict[tuple[int, int], tuple[int, int]] = {}
    pairs = map(_pairs, (sizes, placement.bucket_sizes, placement.resized_sizes))
    for keep, info, size, bucket, resized in zip(placing.kept.tolist(), infos, *pairs, strict=True):
        if keep:
            bucket = buckets.setdefault(bucket, bucket)
            info.image_size, info.bucket_reso, info.resized_size = size, bucket, resized
    for i, _ in placing.left_out:
        _take_out(dataset, infos[i])
    if placing.trained.mode == "all":
        _count_again(dataset, [info for info, keep in zip(infos, placing.kept, strict=True) if keep], placing.trained)
    return placing.trained, [(names[i], reason) for i, reason in placing.left_out]


def _has_own_sizes(dataset: Dataset) -> bool:
    """Whether the metadata of a dataset prescribes buckets; asked before its own are made."""
    return bool(dataset.bucket_manager is not None and dataset.enable_bucket)


def _large_enough(
    dataset: Dataset, infos: list[ImageRecord], sizes: IntArray, unreadable: dict[int, str]
) -> tuple[list[ImageRecord], IntArray, dict[int, str]]:
    """Images of metadata that `skip_image_resolution` does not leave out, with their sizes; it is obeyed here.

    sd-scripts would go by caches whose names begin like an image's, and would count what it leaves out.
    """
    limit = getattr(dataset, "skip_image_resolution", None)
    if limit is None or not all(hasattr(dataset.image_to_subset[info.image_key], "metadata_file") for info in infos):
        return infos, sizes, unreadable
    skips = skipped_images([info.absolute_path for info in infos], list(_pairs(sizes)), limit)
    for i in skips.reasons:
        _take_out(dataset, infos[i])
    if skips.reasons and is_first_process():
        logger.info("%s of %s images left out by skip_image_resolution", len(skips.reasons), len(infos))
        names = [(infos[i].image_key, reason) for i, reason in unreadable.items() if i in skips]
        if names:
            logger.warning("\n".join(skipped_lines(names)))
    kept = [i for i in range(len(infos)) if i not in skips]
    reasons = {at: unreadable[i] for at, i in enumerate(kept) if i in unreadable}
    return [infos[i] for i in kept], sizes[kept], reasons


def _pairs(rows: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    return zip(rows[:, 0].tolist(), rows[:, 1].tolist(), strict=True)


def dataset_keys(dataset: Dataset, options: AdapterOptions) -> DatasetKeys:
    """The bucket keys of one of sd-scripts' dataset objects.

    Some versions have no limits where none are obeyed, with `bucket_no_upscale`: then the usual ones, as far as the
    resolutions lie within them.
    """
    size = (dataset.width, dataset.height)
    sides = [side for resolution in (size, *(options.resolutions or ())) for side in resolution]
    usual = DatasetKeys(size)
    return DatasetKeys(
        size,
        dataset.enable_bucket,
        min(usual.min_bucket_reso, *sides) if dataset.min_bucket_reso is None else dataset.min_bucket_reso,
        max(usual.max_bucket_reso, *sides) if dataset.max_bucket_reso is None else dataset.max_bucket_reso,
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


def _count_again(dataset: Dataset, infos: list[ImageRecord], images: PlacedDataset) -> None:
    """Count an image once for each resolution, in the numbers that sd-scripts prints and writes into metadata."""
    more = ((images.bucket_ids >= 0).sum(axis=1) - 1) * images.repeats
    regular = np.array([bool(info.is_reg) for info in infos], dtype=np.bool_)
    dataset.num_train_images += int(more[~regular].sum())
    dataset.num_reg_images += int(more[regular].sum())
