"""Caching without strategies, as sd-scripts 0.9 does: one file on disk for each image, with one size in it."""

from __future__ import annotations

from collections.abc import Sequence

from kohya_bucket.buckets.sizes import as_pair
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.listing import file_key
from kohya_bucket.sdscripts.objects import HeldDataset, ImageRecord, inner_of

__all__ = ["check_one_size_each"]


def check_one_size_each(datasets: Sequence[HeldDataset]) -> None:
    """Refuse datasets that need different things in an image's file on disk: they would overwrite each other's.

    These are sizes, and alpha masks, which are trained with where they are there.

    Images whose latents were made beforehand are not looked at.

    Raises:
        ConfigError: naming the two datasets and an image.
    """
    first: dict[str, tuple[int, tuple[int, int], bool]] = {}
    for number, dataset in enumerate(datasets, start=1):
        owner = inner_of(dataset)
        records: list[ImageRecord] = list(owner.image_data.values())
        for info in records:
            if info.latents_npz is not None:
                continue
            size = as_pair(info.bucket_reso)
            mask = bool(owner.image_to_subset[info.image_key].alpha_mask)
            key = file_key(info.absolute_path)
            earlier, size_before, mask_before = first.setdefault(key, (number, size, mask))
            if earlier == number or (size, mask) == (size_before, mask_before):
                continue
            how = f"at {size_before[0]}x{size_before[1]} and {size[0]}x{size[1]}"
            if size == size_before:
                how = f"{'with' if mask_before else 'without'} alpha_mask and {'with' if mask else 'without'}"
            raise ConfigError(
                f"datasets {earlier} and {number} both have {info.absolute_path}, {how}, but this way of caching has "
                "one file on disk for each image: give each dataset a folder of its own, leave "
                "--cache_latents_to_disk out (--cache_latents alone keeps latents in memory), or train with "
                "sd-scripts 0.10"
            )
