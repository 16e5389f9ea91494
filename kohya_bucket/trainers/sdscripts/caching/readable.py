"""Caching goes on past images that cannot be read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from kohya_bucket.buckets.sizes import Size
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.formats import UnreadableImageError, not_loaded
from kohya_bucket.texts import one_line
from kohya_bucket.trainers.door.options import AdapterOptions

logger = logging.getLogger("kohya_bucket")
_DONE = "cached, or not to be read"  # in the place of a file's name: sd-scripts' loop passes by


def cache_the_readable(dataset: Any, cache: Callable[[], None], options: AdapterOptions) -> None:
    """Run sd-scripts' loop over a dataset's images, and again without those that it stumbles over.

    Such images are left without latents: training finds them unreadable in its turn, and leaves them out.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop".
        Exception: as sd-scripts raised it, where no image is at fault.
    """
    mine = [info for info in dataset.image_data.values() if info.latents_npz is None]
    left = mine
    try:
        while True:
            try:
                cache()
                return
            except Exception:
                left = [info for info in left if getattr(info, "latents", None) is None]
                found = list(not_loaded_ahead(left))
                if not found:
                    raise
                for info, why in found:
                    tell(info, why, options)
                    info.image = None
                bad = {id(info) for info, _ in found}
                left = [info for info in left if id(info) not in bad]
                # Each process takes every so many images of the list, which must therefore stay as long as it is.
                for info in mine:
                    info.latents_npz = _DONE
                for info in left:
                    info.latents_npz = None
    finally:
        for info in mine:
            if info.latents_npz == _DONE:
                info.latents_npz = None


def tell(info: Any, why: BaseException, options: AdapterOptions) -> None:
    """Name an image that cannot be cached.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop".
    """
    line = not_loaded(why)
    if options.on_bad_image == "stop":
        raise KohyaBucketError(f"{info.absolute_path}: {line}: repair or remove it, or leave on_bad_image out")
    logger.warning("%s", one_line(f"{info.absolute_path} is left out: {line}"))


def check_shape(size: Size, resized_size: Size) -> None:
    """Refuse an image that has not the shape that its bucket was chosen for: sd-scripts would distort it.

    Every rule scales an image by one factor, and rounds each side to the nearest pixel.

    Args:
        size: (width, height) of the image as it was loaded.
        resized_size: that it is to be resized to; a `ResizedSize` where metadata states what `size` should be: then
            nothing is refused, and `plan` names it.

    Raises:
        UnreadableImageError: the sides are not scaled alike.
    """
    (width, height), (resized_width, resized_height) = size, resized_size
    if getattr(resized_size, "is_stated", False):
        return
    if 2 * abs(resized_width * height - resized_height * width) > width + height:
        raise UnreadableImageError(
            f"{width}x{height} pixels now, which is another shape than when its bucket was chosen: start again, if it "
            "was edited"
        )


def not_loaded_ahead(infos: Iterable[Any]) -> Iterator[tuple[Any, BaseException]]:
    """The images that sd-scripts loads ahead, on other threads, and could not load or place."""
    for info in infos:
        ahead = info.image
        if ahead is None or (isinstance(ahead, Future) and (ahead.cancelled() or not ahead.done())):
            continue
        try:
            height, width = (ahead.result() if isinstance(ahead, Future) else ahead).shape[:2]
            check_shape((width, height), info.resized_size)
        except Exception as why:
            yield info, why
