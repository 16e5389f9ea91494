"""Where a dataset's images are trained: in one bucket, or with `resolutions` in one for each resolution."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.dataset_keys import DatasetKeys, at_resolutions, rule_for
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.placed import PlacedDataset
from kohya_bucket.buckets import Placement
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import BucketSettingsError, ConfigError
from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.planning.remainders import policies_of

__all__ = ["Placing", "first_placed", "place_all", "place_images", "refuse_conflicts"]


def refuse_conflicts(keys: DatasetKeys, options: AdapterOptions, *, own_sizes: bool = False) -> None:
    """Refuse options that a dataset's own keys rule out.

    Args:
        keys: the dataset's bucket keys.
        options: the `[kohya_bucket]` table.
        own_sizes: the dataset's metadata prescribes the bucket of each image, and comes with latents of that size.

    Raises:
        ConfigError: with what to change.
    """
    policies = zip(("remainder", "small_buckets"), policies_of(options.remainder, options.small_buckets), strict=False)
    moved_by = [(f"{name} = {policy.name!r}", policy) for name, policy in policies if policy.moves_images]
    moving = moved_by[0][0] if moved_by else ""
    if options.resolutions and not keys.enable_bucket:
        raise ConfigError(
            "[kohya_bucket] resolutions is set, but enable_bucket is off: a dataset without buckets has one size; "
            "set enable_bucket = true, or leave resolutions out"
        )
    if own_sizes and (options.resolutions or moving):
        raise ConfigError(
            f"[kohya_bucket] {moving or 'resolutions'} trains images at other sizes, but this dataset's metadata "
            "sets the size of each image and comes with finished latents: leave it out, or train from the images"
        )
    if keys.enable_bucket and keys.bucket_no_upscale:
        for option, policy in moved_by:
            if policy.enlarges:
                raise ConfigError(
                    f"[kohya_bucket] {option} would enlarge images to the base size, which bucket_no_upscale "
                    "forbids: use 'merge' or 'keep', or leave bucket_no_upscale out"
                )


def place_all(
    keys: DatasetKeys,
    options: AdapterOptions,
    sizes: IntArray,
    place: Callable[[Any], Placement] | None = None,
) -> tuple[Placement, ...]:
    """The placements of a dataset's images: one, or with `resolutions` one per resolution.

    Where an image gets the same bucket at two resolutions (with `bucket_no_upscale`, small images do), it has it at
    the first and none at the other: `all` does not train it twice at one size.

    Args:
        keys: the dataset's bucket keys.
        options: the `[kohya_bucket]` table.
        sizes: [N, 2] (width, height); (0, 0) where unreadable.
        place: in place of the rule that keys and options ask for, where there is one resolution.

    Raises:
        ConfigError, BucketSettingsError: what `rule_for` refuses, with the resolution.
    """
    if not options.resolutions:
        return ((place or rule_for(keys, options, sizes).place)(sizes),)
    columns: list[Placement] = []
    for one in at_resolutions(keys, options):
        try:
            placement = rule_for(one, options, sizes).place(sizes)
        except (BucketSettingsError, ConfigError) as error:
            width, height = one.resolution
            raise type(error)(f"[kohya_bucket] resolutions, {width}x{height}: {error}") from error
        again = np.zeros(len(sizes), dtype=np.bool_)
        for earlier in columns:
            again |= earlier.placed & (earlier.bucket_sizes == placement.bucket_sizes).all(axis=1)
        columns.append(replace(placement, bucket_index=np.where(again, -1, placement.bucket_index).astype(np.int32)))
    return tuple(columns)


@dataclass(frozen=True)
class Placing:
    """What became of N images.

    Attributes:
        per_resolution: their placements, one per resolution; images without a bucket are still in them.
        placement: each at the first resolution at which it has a bucket.
        trained: the M images that have one, in their buckets.
        kept: [N] whether an image is among them.
        left_out: (position, reason) of the others.
        place: places sizes by the same rule; None where there are several resolutions.
    """

    per_resolution: tuple[Placement, ...]
    placement: Placement
    trained: PlacedDataset
    kept: npt.NDArray[np.bool_]
    left_out: tuple[tuple[int, str], ...]
    place: Callable[[Any], Placement] | None


def place_images(
    names: Sequence[str],
    sizes: IntArray,
    repeats: npt.NDArray[np.int64],
    batch_size: int,
    keys: DatasetKeys,
    options: AdapterOptions,
    *,
    unreadable: Mapping[int, str] | None = None,
    prescribed: Callable[[Any], Placement] | None = None,
) -> Placing:
    """Give every image of a data set its bucket: training, plans and caches all do it here.

    Args:
        names: [N] image keys.
        sizes: [N, 2] (width, height); (0, 0) where unreadable.
        repeats: [N] how often an epoch trains each.
        batch_size: images per process and step.
        keys: the data set's bucket keys.
        options: the `[kohya_bucket]` table.
        unreadable: why a file could not be read, by position.
        prescribed: places the images where the data set's metadata says in which buckets.

    Raises:
        ConfigError, BucketSettingsError: options that exclude each other, or from which no buckets follow.
    """
    refuse_conflicts(keys, options, own_sizes=prescribed is not None)
    place = prescribed or (None if options.resolutions else rule_for(keys, options, sizes).place)
    columns = place_all(keys, options, sizes, place)
    placement = first_placed(columns)
    kept = placement.placed
    left_out = tuple(
        (i, (unreadable or {}).get(i) or f"{sizes[i][0]}x{sizes[i][1]}: {placement.reason(i).text}")
        for i in np.flatnonzero(~kept).tolist()
    )
    several = options.resolutions is not None
    mine = columns if kept.all() else tuple(column.select(kept) for column in columns)
    trained = PlacedDataset(
        TextColumn.of([name for name, keep in zip(names, kept.tolist(), strict=True) if keep]),
        repeats[kept],
        first_placed(mine),
        batch_size,
        per_resolution=mine if several else (),
        sizes=sizes[kept] if options.several_sizes else None,
        mode=options.resolution_mode if several else None,
        weights=options.resolution_weights if several else None,
        no_upscale=bool(keys.enable_bucket and keys.bucket_no_upscale),
    )
    return Placing(columns, placement, trained, kept, left_out, place)


def first_placed(columns: tuple[Placement, ...]) -> Placement:
    """Each image's placement at the first resolution at which it has one."""
    if len(columns) == 1:
        return columns[0]
    n = len(columns[0])
    which = np.argmax(np.stack([c.placed for c in columns]), axis=0)

    def rows(name: str) -> Any:
        return np.stack([getattr(c, name) for c in columns])[which, np.arange(n)]

    return Placement(
        None,
        np.where(rows("bucket_index") >= 0, 0, -1).astype(np.int32),
        rows("bucket_sizes"),
        rows("resized_sizes"),
        rows("crop_ltrb"),
        rows("aspect_errors"),
        rows("crop_loss"),
        np.where(rows("bucket_index") >= 0, Reason.PLACED, rows("reasons")).astype(np.uint8),
    )
