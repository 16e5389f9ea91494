"""Where a dataset's images are trained: in one bucket, or with `resolutions` in one for each resolution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.dataset_keys import DatasetKeys, at_resolutions, rule_for
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.placed import PlacedDataset
from kohya_bucket.buckets import Placement
from kohya_bucket.buckets.types import IntArray, Reason
from kohya_bucket.errors import BucketSettingsError, ConfigError

__all__ = ["bucketed", "first_placed", "place_all", "refuse_conflicts"]


def refuse_conflicts(settings: DatasetKeys, options: AdapterOptions, *, own_sizes: bool = False) -> None:
    """Refuse options that a dataset's own keys rule out.

    Args:
        settings: the dataset's bucket keys.
        options: the `[kohya_bucket]` table.
        own_sizes: the dataset's metadata prescribes the bucket of each image, and comes with latents of that size.

    Raises:
        ConfigError: with what to change.
    """
    moving = f"remainder = {options.remainder!r}" if options.remainder in ("merge", "catch_all") else ""
    if options.resolutions and not settings.enable_bucket:
        raise ConfigError(
            "[kohya_bucket] resolutions is set, but enable_bucket is off: a dataset without buckets has one size; "
            "set enable_bucket = true, or leave resolutions out"
        )
    if own_sizes and (options.resolutions or moving):
        raise ConfigError(
            f"[kohya_bucket] {moving or 'resolutions'} trains images at other sizes, but this dataset's metadata "
            "prescribes the size of each and comes with latents made beforehand: leave it out, or train from the images"
        )
    if options.remainder == "catch_all" and settings.enable_bucket and settings.bucket_no_upscale:
        raise ConfigError(
            "[kohya_bucket] remainder = 'catch_all' would enlarge images to the base size, which bucket_no_upscale "
            "forbids: use remainder = 'merge' or 'keep', or leave bucket_no_upscale out"
        )


def place_all(
    settings: DatasetKeys,
    options: AdapterOptions,
    sizes: IntArray,
    place: Callable[[Any], Placement] | None = None,
) -> tuple[Placement, ...]:
    """The placements of a dataset's images: one, or with `resolutions` one per resolution.

    Where an image gets the same bucket at two resolutions (with `bucket_no_upscale`, small images do), it has it at
    the first and none at the other: `all` does not train it twice at one size.

    Args:
        settings: the dataset's bucket keys.
        options: the `[kohya_bucket]` table.
        sizes: [N, 2] (width, height); (0, 0) where unreadable.
        place: in place of the rule that settings and options ask for, where there is one resolution.

    Raises:
        ConfigError, BucketSettingsError: what `rule_for` refuses, with the resolution.
    """
    if not options.resolutions:
        return ((place or rule_for(settings, options, sizes).place)(sizes),)
    columns: list[Placement] = []
    for one in at_resolutions(settings, options):
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


def bucketed(
    keys: Sequence[str],
    repeats: npt.NDArray[np.int64],
    columns: tuple[Placement, ...],
    sizes: IntArray,
    batch_size: int,
    settings: DatasetKeys,
    options: AdapterOptions,
) -> PlacedDataset:
    """The images of a dataset with the placements from `place_all`; all arrays are of the images that have one."""
    several = options.resolutions is not None
    return PlacedDataset(
        keys,
        repeats,
        first_placed(columns),
        batch_size,
        columns=columns if several else (),
        sizes=sizes if options.several_sizes else None,
        mode=options.resolution_mode if several else None,
        weights=options.resolution_weights if several else None,
        enlarge=not (settings.enable_bucket and settings.bucket_no_upscale),
    )


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
