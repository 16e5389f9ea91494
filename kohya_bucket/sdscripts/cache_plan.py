"""Which latents a dataset config needs: one list of items per dataset and kind of caching."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.types import IntArray, Placement
from kohya_bucket.images import read_sizes
from kohya_bucket.images.pool import Progress
from kohya_bucket.latents.wanted import Recipe, Wanted
from kohya_bucket.sdscripts.config import Config, ImageList, ReadDataset, SubsetConfig
from kohya_bucket.sdscripts.placements import place_all
from kohya_bucket.sdscripts.settings import AdapterSettings

__all__ = ["collection_names", "wanted_by_config"]


def collection_names(config: Config) -> list[str]:
    """The part of a store that each dataset's latents go into: "", or its resolution where there are several."""
    resolutions = [dataset.config.bucket_settings.resolution for dataset in config.datasets]
    if len(set(resolutions)) < 2:
        return [""] * len(resolutions)
    return [f"{width}x{height}" for width, height in resolutions]


def wanted_by_config(
    config: Config,
    recipe: Recipe,
    images_root: Path,
    *,
    settings: AdapterSettings | None = None,
    content_hash: bool = False,
    progress: Progress | None = None,
) -> list[Wanted]:
    """What sd-scripts would cache for `config`: buckets, flips, masks and interpolation as each subset says.

    Flips and masks of `recipe` are added for all images. Images of subsets that crop or colour at random are
    listed in `without_bucket`: sd-scripts does not cache their latents. With `resolutions` there are latents at each
    of them; what `merge` and `catch_all` train elsewhere depends on the number of processes, and is cached by the
    trainer.
    """
    out = []
    for dataset, collection in zip(config.datasets, collection_names(config), strict=True):
        for images in [dataset.images] + ([dataset.validation] if dataset.validation is not None else []):
            if len(images):
                own = replace(recipe, collection=collection)
                read = read_sizes(images.paths, progress=progress).sizes
                sizes = np.where(images.stated_sizes > 0, images.stated_sizes, read).astype(np.int32)
                keys, options = dataset.config.bucket_settings, settings or AdapterSettings()
                columns = place_all(keys, options, sizes)
                homeless = ~np.any([column.placed for column in columns], axis=0)
                for number, column in enumerate(columns):
                    if options.resolutions:
                        width, height = options.resolutions[number]
                        own = replace(recipe, collection=f"{width}x{height}")
                    # An image without a bucket at one resolution has one at another; without any, it is named once.
                    here = np.flatnonzero(column.placed | homeless if number == 0 else column.placed)
                    out += _of_dataset(dataset, images, here, sizes, column, own, images_root, content_hash)
    return out


def _of_dataset(
    dataset: ReadDataset,
    images: ImageList,
    here: npt.NDArray[np.intp],
    sizes: IntArray,
    placement: Placement,
    recipe: Recipe,
    images_root: Path,
    content_hash: bool,
) -> list[Wanted]:
    subsets = {subset.number: subset for subset in dataset.config.subsets}
    groups: dict[tuple[bool, bool, str] | None, list[int]] = {}
    for i in here.tolist():
        groups.setdefault(_way(subsets[int(images.subset[i])], dataset), []).append(i)
    out = []
    for way, members in groups.items():
        if way is None:
            continue
        at = np.array(members)
        paths = [images.paths[i] for i in members]
        flip, mask, interpolation = way
        own = replace(recipe, flip=recipe.flip or flip, mask=recipe.mask or mask, interpolation=interpolation)
        captions = _captions(paths, [subsets[int(images.subset[i])] for i in members])
        out.append(
            Wanted.from_placement(
                paths, sizes[at], _take(placement, at), own, images_root, captions=captions, content_hash=content_hash
            )
        )
    reason = "its subset crops or colours at random, so that its latents cannot be cached"
    if groups.get(None) and out:
        out[0].without_bucket += [(images.paths[i], reason) for i in groups[None]]
    return out


def _take(placement: Placement, at: npt.NDArray[np.int64]) -> Placement:
    """The rows `at` of a placement."""
    rows = {f.name: getattr(placement, f.name)[at] for f in fields(placement) if f.name != "bucket_set"}
    return Placement(placement.bucket_set, **rows)


def _way(subset: SubsetConfig, dataset: ReadDataset) -> tuple[bool, bool, str] | None:
    """(flip, mask, interpolation) of a subset's caches, or None if sd-scripts caches none."""
    if subset.random_crop or subset.color_aug:
        return None
    return (
        subset.flip_aug, subset.alpha_mask, subset.resize_interpolation or dataset.config.resize_interpolation or "auto"
    )  # fmt: skip


def _captions(paths: Sequence[str], subsets: Sequence[SubsetConfig]) -> list[str | None]:
    out: list[str | None] = []
    for path, subset in zip(paths, subsets, strict=True):
        beside = Path(os.path.splitext(path)[0] + subset.caption_extension)  # noqa: PTH122
        try:
            out.append(beside.read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError):
            out.append(subset.class_tokens)
    return out
