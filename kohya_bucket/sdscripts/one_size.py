"""Caching without strategies, as sd-scripts 0.9 does: one file on disk for each image, and one size in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kohya_bucket.errors import ConfigError

__all__ = ["check_one_size_each"]


def check_one_size_each(datasets: Sequence[Any]) -> None:
    """Refuse datasets that need an image's file on disk at different sizes: they would overwrite each other's.

    Images whose latents were made beforehand are not looked at.

    Raises:
        ConfigError: naming the two datasets and an image.
    """
    first: dict[str, tuple[int, tuple[int, int]]] = {}
    for number, dataset in enumerate(datasets, start=1):
        owner = getattr(dataset, "dreambooth_dataset_delegate", dataset)
        for info in owner.image_data.values():
            if info.latents_npz is not None:
                continue
            size = int(info.bucket_reso[0]), int(info.bucket_reso[1])
            key = os.path.normcase(os.path.abspath(info.absolute_path))  # noqa: PTH100
            earlier, before = first.setdefault(key, (number, size))
            if earlier != number and before != size:
                raise ConfigError(
                    f"datasets {earlier} and {number} both have {info.absolute_path}, at {before[0]}x{before[1]} and "
                    f"{size[0]}x{size[1]}, but this way of caching has one file on disk for each image: give each "
                    "dataset a folder of its own, leave --cache_latents_to_disk out (--cache_latents alone keeps "
                    "latents in memory), or train with sd-scripts 0.10"
                )
