"""The same for sd-scripts until 0.9, which caches without strategies and loads each image when its batch comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from PIL import Image

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.images.pixels import NO_IMAGE
from kohya_bucket.sdscripts.caching.readable import tell

__all__ = ["cache_the_readable_plainly"]


def cache_the_readable_plainly(dataset: Any, cache: Callable[[], None], options: AdapterOptions) -> None:
    """Run sd-scripts' loop over a dataset's images, and again without each that it stumbles over.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop".
        Exception: as sd-scripts raised it, where no image is at fault.
    """
    everything = dataset.image_data
    named = {key: info.latents_npz for key, info in everything.items()}
    left = dict(everything)
    try:
        while True:
            try:
                cache()
                return
            except NO_IMAGE:  # anything else, such as a GPU without memory, is no image's fault
                left = {key: info for key, info in left.items() if getattr(info, "latents", None) is None}
                found = _first_unreadable(left[key] for key in left if named[key] is None)
                if found is None:
                    raise
                info, why = found
                tell(info, why, options)
                del left[info.image_key]
                for key, one in left.items():  # files that are whole are found to be so again
                    one.latents_npz = named[key]
                info.latents_npz = None
                dataset.image_data = left
    finally:
        dataset.image_data = everything


def _first_unreadable(infos: Iterable[Any]) -> tuple[Any, Exception] | None:
    """The image at which the loop ended: it takes small buckets first, and those without a file."""
    in_order = sorted(infos, key=lambda info: info.bucket_reso[0] * info.bucket_reso[1])
    for info in sorted(in_order, key=lambda info: bool(info.latents_npz) and os.path.exists(info.latents_npz)):  # noqa: PTH110
        try:
            with Image.open(info.absolute_path) as image:
                image.load()
        except NO_IMAGE as error:
            return info, error
    return None
