"""Where a data set's caches in shards lie."""

from __future__ import annotations

import os
from pathlib import Path

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.latents.remote.remote_path import Place, as_given

__all__ = ["store_folder"]

_NAME = "kohya_bucket_latents"


def store_folder(options: AdapterOptions, first_image: str | os.PathLike[str]) -> Place:
    """`latent_cache_dir`, or the folder `kohya_bucket_latents` beside a data set's first image.

    Wherever training is started, it finds the same folder, and whoever moves the images takes it along.
    """
    if options.latent_cache_dir:
        return as_given(options.latent_cache_dir)
    return Path(first_image).absolute().parent / _NAME
