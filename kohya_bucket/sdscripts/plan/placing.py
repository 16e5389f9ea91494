"""The images of a dataset config, placed as training places them."""

from __future__ import annotations

import numpy as np

from kohya_bucket.adapter.kept_sizes import scan_sizes
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.placing import Placing, place_images
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.sizes import SizeScan
from kohya_bucket.sdscripts.config import ImageList, ReadDataset
from kohya_bucket.sdscripts.datasets.bucket_manager import BucketManager

__all__ = ["place_listed", "sizes_of"]


def sizes_of(
    images: ImageList, options: AdapterOptions, progress: Progress | None = None
) -> tuple[IntArray, dict[int, str], SizeScan | None]:
    """Sizes of images: as their metadata states them, or else from their headers, which are kept for other commands.

    Returns:
        [N, 2] (width, height), (0, 0) where unreadable; why, by position; what was read.
    """
    sizes = images.stated_sizes.copy()
    unknown = np.flatnonzero(sizes.min(axis=1, initial=1) <= 0)
    if not len(unknown):
        return sizes, {}, None
    scan = scan_sizes([images.paths[i] for i in unknown], options.metadata_cache, progress)
    sizes[unknown] = scan.sizes
    return sizes, {int(unknown[i]): reason for i, _, reason in scan.failures}, scan


def place_listed(
    dataset: ReadDataset,
    images: ImageList,
    sizes: IntArray,
    options: AdapterOptions,
    unreadable: dict[int, str] | None = None,
) -> Placing:
    """Some images of a data set, those that are trained or those that are held back, in their buckets.

    Raises:
        ConfigError, BucketSettingsError: options that exclude each other, or from which no buckets follow.
    """
    prescribed = None
    if images.predefined:
        manager = BucketManager(False, None, None, None, None)
        manager.set_predefined_resos(images.predefined)
        prescribed = manager.place
    return place_images(
        images.keys, sizes, images.repeats, dataset.config.batch_size, dataset.config.dataset_keys, options,
        unreadable=unreadable, prescribed=prescribed,
    )  # fmt: skip
