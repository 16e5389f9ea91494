"""Which latents a dataset config needs: one list of items per dataset and kind of caching."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.images.listing import file_key
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.sizes import SizeScan
from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.trainers.door.group import moved_images
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import placed_in
from kohya_bucket.trainers.sdscripts.config import Config, ReadDataset, SubsetConfig
from kohya_bucket.trainers.sdscripts.config.model import refuse_lost_focus
from kohya_bucket.trainers.sdscripts.dataset_images import DatasetTable


def wanted_by_config(
    config: Config, encoding: EncodeOptions, images_root: Path, *, options: AdapterOptions | None = None,
    gpus: Sequence[int] = (1,), content_hash: bool = False, progress: Progress | None = None,
) -> list[LatentItems]:  # fmt: skip
    """What sd-scripts would cache for `config`: buckets, flips, masks and interpolation as each subset says.

    Flips and masks of `encoding` are added for all images. Images of subsets that crop or colour at random are
    listed in `without_bucket`: sd-scripts does not cache their latents. With `resolutions` there are latents at each
    of them; with `merge` and `catch_all` also at the sizes that images may be moved to in any epoch, which depend on
    the numbers of processes in `gpus`.

    Raises:
        ConfigError: options that exclude each other.
    """
    options = options or AdapterOptions()
    names = ["{}x{}".format(*dataset.config.dataset_keys.resolution) for dataset in config.datasets]
    # Each dataset with the part of a store that its latents go into.
    pairs = list(zip(config.datasets, names if len(set(names)) > 1 else [""] * len(names), strict=True))
    # sd-scripts caches all that is trained before all that is held back.
    training = [(dataset, name, dataset.images) for dataset, name in pairs]
    validation = [(dataset, name, dataset.validation) for dataset, name in pairs if dataset.validation is not None]
    out = []
    for number, (dataset, collection, images) in enumerate([*training, *validation]):
        if len(images):
            refuse_lost_focus(dataset.config, options, config.release)
            scan = images.sizes(options.metadata_cache, progress)
            for part in _cached_sizes(dataset, images, scan, options, gpus, collection):
                wanted = _of_dataset(dataset, images, scan.sizes, encoding, images_root, content_hash, part)
                out += [replace(items, dataset=number) for items in wanted]
    return _with_shared_requests(out)


def _with_shared_requests(parts: list[LatentItems]) -> list[LatentItems]:
    """Flips and masks of an item for all datasets that share it: of two ways of making it, the later would win."""
    if len({(part.encoding.flip, part.encoding.mask) for part in parts}) < 2:
        return parts
    # What any part asks for an item, all parts ask for: so each part falls into pieces that ask alike.
    flipped, masked = (
        {item for part in parts if getattr(part.encoding, name) for item in items_of(part)} for name in ("flip", "mask")
    )
    out = []
    for part in parts:
        groups: dict[tuple[bool, bool], list[int]] = {}
        for i, item in enumerate(items_of(part)):
            groups.setdefault((item in flipped, item in masked), []).append(i)
        pieces = [
            replace(part.subset(group), encoding=replace(part.encoding, flip=flip, mask=mask))
            for (flip, mask), group in groups.items()
        ] or [part]
        pieces[0].without_bucket = part.without_bucket
        out += pieces
    return out


def items_of(part: LatentItems) -> Iterator[tuple[str, int, int]]:
    """(file key, width, height) of each item, by the size of its bucket."""
    return zip(map(file_key, part.paths), *part.bucket_sizes.T.tolist(), strict=True)


class _CachedSize(NamedTuple):
    """What the trainer caches of a dataset, at one size for each image.

    Attributes:
        rows: positions of the images in the dataset.
        placement: where they are cached.
        collection: the part of a store that their latents go into, which holds no image twice.
        further: these are sizes besides the bucket that sd-scripts knows of.
    """

    rows: npt.NDArray[np.intp]
    placement: Placement
    collection: str
    further: bool


def _of_dataset(
    dataset: ReadDataset, images: DatasetTable, sizes: IntArray, encoding: EncodeOptions, images_root: Path,
    content_hash: bool, part: _CachedSize,
) -> list[LatentItems]:  # fmt: skip
    """The latents of a part, by the ways in which subsets have theirs cached."""
    placement, encoding = part.placement, replace(encoding, collection=part.collection)
    subsets = {subset.number: subset for subset in dataset.config.subsets}
    groups: dict[tuple[bool, bool, str] | None, list[int]] = {}
    for member, i in enumerate(part.rows.tolist()):
        groups.setdefault(_way(subsets[int(images.subset[i])], dataset), []).append(member)
    out = []
    for way, group in groups.items():
        if way is None:
            continue
        flip, mask, interpolation = way
        encoding_of_group = replace(
            encoding, flip=encoding.flip or flip, mask=encoding.mask or mask, interpolation=interpolation
        )
        members = np.array(group)
        rows = part.rows[members]
        paths = [images.paths[i] for i in rows.tolist()]
        captions = [images.captions[i] for i in rows.tolist()] if images.captions else None
        out.append(
            LatentItems.from_placement(
                paths, sizes[rows], placement.select(members), encoding_of_group, images_root, captions=captions,
                content_hash=content_hash, further=part.further,
            )
        )  # fmt: skip
    left_out = [] if part.further else groups.get(None, [])
    if left_out and not out:  # a part without items says why there are none
        none = placement.select(np.zeros(0, dtype=np.intp))
        out.append(LatentItems.from_placement([], sizes[:0], none, encoding, images_root, content_hash=content_hash))
    if left_out:
        out[0].without_bucket += [(images.paths[i], _AT_RANDOM) for i in part.rows[left_out].tolist()]
    return out


_AT_RANDOM = "its subset has random_crop or color_aug, so that its latents cannot be cached"


def _way(subset: SubsetConfig, dataset: ReadDataset) -> tuple[bool, bool, str] | None:
    """(flip, mask, interpolation) of a subset's caches, or None if sd-scripts caches none."""
    if subset.random_crop or subset.color_aug:
        return None
    return (
        subset.flip_aug, subset.alpha_mask, subset.resize_interpolation or dataset.config.resize_interpolation or "auto"
    )  # fmt: skip


def _cached_sizes(
    dataset: ReadDataset, images: DatasetTable, scan: SizeScan, options: AdapterOptions, gpus: Iterable[int],
    collection: str,
) -> Iterator[_CachedSize]:  # fmt: skip
    """What the trainer caches for some images of a dataset. Those without a bucket are in the first part.

    `images` are those that are trained, or those that are held back for validation. `collection` is the dataset's; with
    `resolutions`, each has its own.

    Raises:
        ConfigError, BucketSettingsError: settings that exclude each other, or from which no buckets follow.
    """
    placing = images.place(scan, dataset.config.batch_size, dataset.config.dataset_keys, options)
    trained = placing.trained
    names = [f"{width}x{height}" for width, height in options.resolutions or ()] or [collection]
    # At the first resolution with a bucket for it, an image is in sd-scripts' usual file; at others in further ones.
    placed_at = np.stack([placement.placed for placement in placing.placements])
    usual = np.where(placed_at.any(axis=0), np.argmax(placed_at, axis=0), -1)
    for resolution, placement in enumerate(placing.placements):
        in_usual_file = usual == resolution
        in_further_file = placement.placed & ~in_usual_file
        if resolution == 0:
            in_usual_file |= usual < 0  # images without any bucket, of which the first part tells
        for rows, further in ((in_usual_file, False), (in_further_file, True)):
            if rows.any():
                yield _CachedSize(np.flatnonzero(rows), placement.select(rows), names[resolution], further)
    if not options.moving:
        return
    # Sizes that remainders are moved to in some epoch, each in a collection of its own.
    placed = np.flatnonzero(placing.placement.placed)  # the rows of `trained`
    image, bucket = moved_images(trained, options, gpus)
    for target in np.unique(bucket).tolist():
        rows = placed[image[bucket == target]]
        size = trained.buckets[target]
        focus = None if trained.focus is None else trained.focus[image[bucket == target]]
        name = "{} to {}x{}".format(names[int(trained.resolution_of_bucket[target])], *size).strip()
        yield _CachedSize(rows, placed_in(size, scan.sizes[rows], focus), name, True)
