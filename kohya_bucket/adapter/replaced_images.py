"""A batch of which an image cannot be read: the image is left out, and another of its bucket trains in its place.

Trainers would end the run in a traceback. Pictures, masks, control images and cached files are all read here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import get_worker_info

from kohya_bucket.adapter.bad_images import counted_here
from kohya_bucket.adapter.batches import PlannedBatch
from kohya_bucket.errors import KohyaBucketError, StorageError
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.texts import one_line

__all__ = ["batch_of_the_readable"]

_TRIES = 8  # of images in the place of another, each of which is read

logger = logging.getLogger("kohya_bucket")
_told: set[tuple[int, int]] = set()


class InBuckets(Protocol):
    """The images of a data set: their names, and (image, bucket) of each bucket that trains one."""

    @property
    def keys(self) -> Sequence[str]: ...

    @property
    def pairs(self) -> tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.integer[Any]]]: ...


def batch_of_the_readable(
    make: Callable[[PlannedBatch], Any], index: PlannedBatch, images: InBuckets, error: Exception, on_bad_image: str
) -> Any:
    """The batch of `index` without the images that cannot be read.

    Args:
        make: makes a batch.
        index: the batch that could not be made.
        images: its data set's.
        error: why.
        on_bad_image: the option of this name.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop".
        Exception: `error`, where it is not an image's fault, or no image can be read in its place.
    """
    if isinstance(error, StorageError):  # nor can others, and all would be left out
        raise error
    bad = {image: why for image in dict.fromkeys(index.images.tolist()) if (why := _why_unreadable(make, index, image))}
    if not bad:
        raise error
    if on_bad_image == "stop" and get_worker_info() is None:  # a worker cannot end the run: it counts
        image, why = next(iter(bad.items()))
        raise KohyaBucketError(f"{images.keys[image]}: {why}: repair or remove it, or leave on_bad_image out")
    good = [image for image in index.images.tolist() if image not in bad]
    spare = _spare(make, index, images, {*good, *bad})
    for image, why in bad.items():
        found = next(spare, None)
        good += [] if found is None else [found]
        _tell(index.dataset, image, images, why, found)
    if not good:
        raise error
    return make(_with_images(index, good))


def _spare(
    make: Callable[[PlannedBatch], Any], index: PlannedBatch, images: InBuckets, taken: set[int]
) -> Iterator[int]:
    """Readable images of the same bucket that the batch does not hold, in an order that depends on its seed alone."""
    image, bucket = images.pairs
    others = np.setdiff1d(image[bucket == index.bucket], list(taken))
    np.random.RandomState(index.seed & 0xFFFFFFFF).shuffle(others)
    for other in others[:_TRIES].tolist():
        if not _why_unreadable(make, index, other):
            yield other


def _why_unreadable(make: Callable[[PlannedBatch], Any], index: PlannedBatch, image: int) -> str:
    """Why not even a batch of this image alone can be made; an empty text where it can."""
    try:
        make(_with_images(index, [image]))
    except (MemoryError, StorageError):
        raise
    except Exception as error:
        return not_loaded(error)
    return ""


def _with_images(index: PlannedBatch, images: list[int]) -> PlannedBatch:
    return PlannedBatch.make(
        int(index), index.epoch, index.dataset, np.array(images, dtype=np.int32), index.seed, index.bucket,
        index.global_step, index.loss_scale,
    )  # fmt: skip


def _tell(dataset: int, image: int, images: InBuckets, why: str, instead: int | None) -> None:
    counts = counted_here()
    if counts is not None:
        counts.note(dataset, image)
    if (dataset, image) not in _told:
        _told.add((dataset, image))
        place = "" if instead is None else f"; {images.keys[instead]} trains in its place"
        logger.warning("%s", one_line(f"{images.keys[image]} is left out: {why}{place}"))
