"""A batch of the plan as a loader's index, and what is trained in place of images that cannot be read.

Trainers would end the run in a traceback. Pictures, masks, control images and cached files are all read here.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.datasets.planned_index import spare_images
from kohya_bucket.errors import ConfigError, KohyaBucketError, StorageError, UnreadableError
from kohya_bucket.images.formats import not_loaded
from kohya_bucket.images.listing import refuse_if_away
from kohya_bucket.texts import one_line
from kohya_bucket.trainers.door.placed import InBuckets

logger = logging.getLogger("kohya_bucket")


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """A loader's index, with all that a worker needs to know.

    Attributes:
        position: in the epoch.
        epoch: the epoch as the trainer counts it.
        dataset: position of the dataset in its group.
        images: [B] int32 image numbers within that dataset; an image that is trained twice stands twice.
        seed: for flips, crops and caption shuffles of this batch, the same whichever worker loads it.
        bucket: position in the dataset's buckets at whose size the images are trained.
        global_step: the trainer's step when the batch was asked for; None where steps are not counted.
        loss_scale: what the batch's loss is multiplied by, so that images weigh the same on any number of ranks.
    """

    position: int
    epoch: int
    dataset: int
    images: npt.NDArray[np.int32]
    seed: int
    bucket: int
    global_step: int | None = None
    loss_scale: float = 1.0

    def with_images(self, images: list[int]) -> PlannedBatch:
        """The same of other images."""
        return replace(self, images=np.array(images, dtype=np.int32))


class ImageKey(str):
    """An image key that knows its row in the dataset, so that no table of all keys is searched for it."""

    __slots__ = ("row",)
    row: int

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


class BadImages:
    """How often each image of a group could not be read; a loader's workers and its trainer share the numbers.

    Args:
        first_image: [D + 1] number of each dataset's first image in the group, and of all images.
    """

    def __init__(self, first_image: Sequence[int]) -> None:
        self._first = [int(number) for number in first_image]
        self._shared = RawArray(ctypes.c_int32, self._first[-1] + 2)  # the last: all together, and those replaced

    def note(self, dataset: int, image: int, replaced: bool) -> None:
        """An image of a dataset could not be read, and perhaps another one was trained in its place."""
        self._shared[self._first[dataset] + image] += 1
        self._shared[self._first[-1]] += 1
        self._shared[self._first[-1] + 1] += replaced

    def __bool__(self) -> bool:
        return self.total > 0

    @property
    def total(self) -> int:
        """How often so far, all images together."""
        return int(self._shared[self._first[-1]])

    @property
    def replaced(self) -> int:
        """How often so far another image was trained in the place of one."""
        return int(self._shared[self._first[-1] + 1])

    @property
    def counts(self) -> npt.NDArray[np.int32]:
        """[N] how often so far, by an image's number in the group; a copy."""
        return np.array(self._shared[: self._first[-1]], dtype=np.int32)

    def count_here(self) -> None:
        """Let what is read in this process from now on be counted here."""
        _here[:] = [self]


_OF_ALL_IMAGES = MemoryError, ConfigError, StorageError, UnreadableError  # no other image could be read either
_here: list[BadImages] = []  # where this process counts; nothing until a plan is drawn from
_told: set[tuple[int, int]] = set()


def batch_of_the_readable(
    make: Callable[[PlannedBatch], Any], index: PlannedBatch, images: InBuckets, on_bad_image: str
) -> Any:
    """What `make` makes of `index`, without the images that cannot be read.

    Raises:
        KohyaBucketError: `on_bad_image` is "stop", or nothing can be read now where an image or its cache lies.
        Exception: as `make` raised it, where it is not an image's fault, or no image can be read in its place.
    """
    try:
        return make(index)
    except _OF_ALL_IMAGES:
        raise
    except Exception as raised:
        error = raised
    from torch.utils.data import get_worker_info

    bad = {
        image: why
        for image in dict.fromkeys(index.images.tolist())
        if (why := _why_unreadable(make, index, images, image))
    }
    if not bad:
        raise error
    if on_bad_image == "stop" and get_worker_info() is None:  # a worker cannot end the run: it counts
        image, why = next(iter(bad.items()))
        raise KohyaBucketError(f"{images.keys[image]}: {why}: repair or remove it, or leave on_bad_image out")
    good = [image for image in index.images.tolist() if image not in bad]
    spare = _spare(make, index, images, {*good, *bad})
    for image, why in bad.items():
        replacement = next(spare, None)
        good += [] if replacement is None else [replacement]
        _tell(index.dataset, image, images, why, replacement)
    if not good:
        raise error
    return make(index.with_images(good))


def _spare(
    make: Callable[[PlannedBatch], Any], index: PlannedBatch, images: InBuckets, excluded: set[int]
) -> Iterator[int]:
    """Readable images of the same bucket that the batch does not hold, in an order that depends on its seed alone."""
    image, bucket = images.pairs
    for other in spare_images(image[bucket == index.bucket], excluded, index.seed):
        if not _why_unreadable(make, index, images, other):
            yield other


def _why_unreadable(make: Callable[[PlannedBatch], Any], index: PlannedBatch, images: InBuckets, image: int) -> str:
    """Why not even a batch of this image alone can be made; an empty text where it can."""
    try:
        make(index.with_images([image]))
    except _OF_ALL_IMAGES:
        raise
    except Exception as error:
        cause: BaseException | None = error
        key, stated = images.keys[image], True
        while cause is not None and not isinstance(cause, OSError):
            stated = stated and cause.__cause__ is not None
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            # What is not stated as the cause may be of another file, which was looked for first.
            of_image = not stated and Path(key).is_absolute()
            refuse_if_away(str(key if of_image else cause.filename or key), cause)
        return not_loaded(error)
    return ""


def _tell(dataset: int, image: int, images: InBuckets, why: str, instead: int | None) -> None:
    for counts in _here:
        counts.note(dataset, image, instead is not None)
    if (dataset, image) not in _told:
        _told.add((dataset, image))
        place = "" if instead is None else f"; {images.keys[instead]} trains in its place"
        logger.warning("%s", one_line(f"{images.keys[image]} is left out: {why}{place}"))
