"""Caching goes on without images that cannot be read: sd-scripts would end in a traceback, after hours perhaps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.texts import one_line

__all__ = ["cache_the_readable", "tell"]

_DONE = "cached, or not to be read"  # in the place of a file's name: sd-scripts' loop passes by

logger = logging.getLogger("kohya_bucket")


def cache_the_readable(dataset: Any, cache: Callable[[], None], options: AdapterOptions) -> None:
    """Run sd-scripts' loop over a dataset's images, and again without those that it stumbles over.

    It loads images ahead, and ends where one cannot be loaded. Such images are left without latents: training finds
    them unreadable in its turn, and leaves them out.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop".
        Exception: as sd-scripts raised it, where no image is at fault.
    """
    mine = [info for info in dataset.image_data.values() if info.latents_npz is None]
    bad: list[Any] = []
    try:
        while True:
            try:
                cache()
                return
            except Exception:
                found = [info for info in mine if _failure(info.image) is not None]
                if not found:
                    raise
                for info in found:
                    tell(info, _failure(info.image), options)
                bad += found
                _begin_again(mine, bad)
    finally:
        for info in mine:
            if info.latents_npz == _DONE:
                info.latents_npz = None


def _begin_again(mine: list[Any], bad: list[Any]) -> None:
    # Each process takes every so many images of the list, which must therefore stay as long as it is.
    for info in bad:
        info.image = None
    unreadable = {id(info) for info in bad}
    for info in mine:
        in_memory = getattr(info, "latents", None) is not None
        info.latents_npz = _DONE if in_memory or id(info) in unreadable else None


def tell(info: Any, why: BaseException | None, options: AdapterOptions) -> None:
    """Name an image that cannot be cached.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop".
    """
    line = "" if why is None else not_loaded(why)
    if options.on_bad_image == "stop":
        raise KohyaBucketError(f"{info.absolute_path}: {line}: repair or remove it, or leave on_bad_image out")
    logger.warning("%s", one_line(f"{info.absolute_path} is left out: {line}"))


def _failure(image: Any) -> BaseException | None:
    """Why an image that was loaded ahead could not be."""
    return image.exception() if isinstance(image, Future) and image.done() and not image.cancelled() else None
