"""At which sizes the images of a dataset are cached: their own, those of other resolutions, and where they may move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.moved_images import moved_images
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.buckets import BucketSet
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.rule import InSet
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.sdscripts.config import ImageList, ReadDataset
from kohya_bucket.sdscripts.plan.placing import place_listed

__all__ = ["CachedSizes", "cached_sizes"]


@dataclass(frozen=True)
class CachedSizes:
    """Images at one size each.

    Attributes:
        rows: [M] their positions in the dataset.
        placement: of these images.
        collection: where in a store their latents go; no image is in one twice.
        further: sizes besides the bucket that sd-scripts knows of.
    """

    rows: npt.NDArray[np.intp]
    placement: Placement
    collection: str
    further: bool


def cached_sizes(
    dataset: ReadDataset,
    images: ImageList,
    sizes: IntArray,
    options: AdapterOptions,
    gpus: Iterable[int],
    collection: str,
) -> list[CachedSizes]:
    """What the trainer caches for some images of a dataset; those without a bucket are in the first part.

    Args:
        images: those that are trained, or those that are held back for validation.
        sizes: [N, 2] their sizes.
        gpus: numbers of processes that will train.
        collection: of the dataset; with `resolutions`, each has its own.

    Raises:
        ConfigError, BucketSettingsError: settings that exclude each other, or from which no buckets follow.
    """
    placing = place_listed(dataset, images, sizes, options)
    columns, trained = placing.per_resolution, placing.trained
    names = [f"{width}x{height}" for width, height in options.resolutions or ()] or [collection]
    own = _own_column(columns)
    out = []
    for number, column in enumerate(columns):
        here = own == number
        for rows, further in ((here if number else here | (own < 0), False), (column.placed & ~here, True)):
            if rows.any():
                out.append(CachedSizes(np.flatnonzero(rows), column.select(rows), names[number], further))
    if not options.moves_images:
        return out
    placed = np.flatnonzero(placing.kept)
    image, bucket = moved_images(trained, options, gpus)
    for target in np.unique(bucket).tolist():
        rows = placed[image[bucket == target]]
        width, height = trained.buckets[target]
        only = BucketSet.from_dims([(width, height)])
        placement = InSet(sizes[rows], only, np.zeros(len(rows), dtype=np.int32)).placement()
        name = f"{names[int(trained.resolution_of_bucket[target])]} to {width}x{height}".strip()
        out.append(CachedSizes(rows, placement, name, True))
    return out


def _own_column(columns: tuple[Placement, ...]) -> npt.NDArray[np.intp]:
    """[N] the first resolution at which an image has a bucket, which is its own; -1 without any."""
    placed = np.stack([column.placed for column in columns])
    return np.where(placed.any(axis=0), np.argmax(placed, axis=0), -1)
