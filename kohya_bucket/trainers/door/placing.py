"""The images of one dataset in their buckets: what `plan` prints and what the adapter trains.

An image has one bucket, or with `resolutions` one for each resolution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import Placement
from kohya_bucket.buckets.focus import focused
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.errors import BucketSettingsError, ConfigError
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, at_resolutions, rule_for, without_effect_on
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import OF_RESOLUTIONS, PlacedDataset, first_placed, focus_of
from kohya_bucket.trainers.door.ranks import warn_once


def refuse_conflicts(keys: DatasetKeys, options: AdapterOptions) -> None:
    """Refuse options that a dataset's own keys rule out.

    Raises:
        ConfigError, BucketSettingsError: with what to change.
    """
    if options.focus and not keys.enable_bucket:
        raise ConfigError(
            "[kohya_bucket] focus is set, but enable_bucket is off, so that no crop can be moved: set "
            "enable_bucket = true, or leave focus out"
        )
    if options.resolutions and not keys.enable_bucket:
        raise ConfigError(
            "[kohya_bucket] resolutions is set, but enable_bucket is off: a dataset without buckets has one size; "
            "set enable_bucket = true, or leave resolutions out"
        )
    if keys.enable_bucket and keys.bucket_no_upscale:
        for name, policy in options.moving.items():
            if policy.enlarges:
                raise ConfigError(
                    f"[kohya_bucket] {name} = {policy.name!r} would enlarge images to the base size, which "
                    "bucket_no_upscale forbids: use 'merge' or 'keep', or leave bucket_no_upscale out"
                )


def place_all(
    keys: DatasetKeys, options: AdapterOptions, sizes: IntArray, focus: FloatArray | None = None
) -> tuple[Placement, ...]:
    """The placements of a dataset's images: one, or with `resolutions` one per resolution.

    Where an image gets the same bucket at two resolutions (with `bucket_no_upscale`, small images do), it has it at
    the first and none at the other: `all` does not train it twice at one size.

    Args:
        sizes: [N, 2] (width, height); (0, 0) where unreadable.
        focus: [N, 4] what crops must keep, see `buckets/focus.py`.

    Raises:
        ConfigError, BucketSettingsError: what `rule_for` refuses, with the resolution.
    """
    if not options.resolutions:
        return (focused(rule_for(keys, options, sizes).place(sizes), focus),)
    placements: list[Placement] = []
    for one in at_resolutions(keys, options):
        try:
            placement = focused(rule_for(one, options, sizes).place(sizes), focus)
        except (BucketSettingsError, ConfigError) as error:
            width, height = one.resolution
            raise type(error)(f"[kohya_bucket] resolutions, {width}x{height}: {error}") from error
        placements.append(placement)
    return each_once(placements)


def each_once(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements of the same images at several resolutions; an image has the same bucket at the first of them only."""
    out: list[Placement] = []
    for placement in placements:
        again = np.zeros(len(placement), dtype=np.bool_)
        for earlier in out:
            again |= earlier.placed & (earlier.bucket_sizes == placement.bucket_sizes).all(axis=1)
        out.append(replace(placement, bucket_index=np.where(again, -1, placement.bucket_index).astype(np.int32)))
    return tuple(out)


def place_images(
    names: Sequence[str], sizes: IntArray, repeats: npt.NDArray[np.int64], batch_size: int, keys: DatasetKeys,
    options: AdapterOptions, *, paths: Sequence[str] | None = None, unreadable: Mapping[int, str] | None = None,
) -> PlacedDataset:  # fmt: skip
    """Give every image of a dataset its bucket: training, plans and caches all do it here.

    Args:
        names: [N] image keys.
        sizes: [N, 2] (width, height); (0, 0) where unreadable.
        repeats: [N] how often an epoch trains each.
        paths: [N] their files, by which a focus is found; None: the keys.
        unreadable: why a file could not be read, by position.

    Raises:
        ConfigError, BucketSettingsError: options that exclude each other, or from which no buckets follow.
    """
    refuse_conflicts(keys, options)
    warn_once(without_effect_on(keys, options))
    focus = focus_of(options, names if paths is None else paths)
    placements = place_all(keys, options, sizes, focus)
    placement = first_placed(placements)
    left_out = tuple(
        (i, (unreadable or {}).get(i) or f"{sizes[i][0]}x{sizes[i][1]}: {placement.reason(i).text}")
        for i in np.flatnonzero(~placement.placed).tolist()
    )
    several, of_epochs = options.resolutions is not None, options.of_epochs()
    return PlacedDataset(
        names,
        repeats,
        placement,
        batch_size,
        keys.resolution,
        per_resolution=placements if several else (),
        sizes=sizes if options.several_sizes else None,
        of_resolutions={name: of_epochs[name] for name in OF_RESOLUTIONS if several},
        no_upscale=bool(keys.enable_bucket and keys.bucket_no_upscale),
        focus=focus,
        left_out=left_out,
    )


def refuse_unmatched(options: AdapterOptions, focuses: Sequence[FloatArray | None]) -> None:
    """Refuse a focus that no image of any dataset has: its file is of other images, or names them otherwise.

    Args:
        focuses: what `focus_of` gives of each dataset.

    Raises:
        ConfigError: with the folder that names are relative to.
    """
    nonempty = [focus for focus in focuses if focus is not None and len(focus)]
    if options.focus is not None and nonempty and np.isnan(np.concatenate(nonempty)).all():
        from kohya_bucket.images.focus_files import unfound

        said = unfound(options.focus, np.concatenate(nonempty), ())
        raise ConfigError(f"[kohya_bucket] {said}: correct the names, or leave focus out")
