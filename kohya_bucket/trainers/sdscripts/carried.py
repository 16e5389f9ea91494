"""What sd-scripts carries for us without knowing: values of its own types that know more.

| | sd-scripts reads | the adapter finds in it |
| --- | --- | --- |
| `ResizedSize` | a tuple: the size it resizes to | what is cut out, and whether metadata states the image's size |
| `SizedPath` | a text: the image it opens for its cache | at which other size that is |
| `InitialStep` | an int: the updates that are done | the epoch of the next one, whatever it computes |
| `ImageKey`, in `door/batches.py` | a text: the key of a record | the row in the table of all |
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.geometry import cut_pixels
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import Size


class ResizedSize(tuple[int, int]):
    """The size that an image is resized to, (width, height), with what a plain pair cannot tell.

    Attributes:
        crop: left and top of the bucket that is cut out of it; None: its middle.
        is_stated: the image's own size is what metadata says, which its file need not have.
    """

    crop: Size | None = None
    is_stated: bool = False

    @classmethod
    def from_row(cls, row: list[int]) -> Size:
        """Of width, height, left, top (-1: in the middle) and whether it is stated; a plain size if that tells all."""
        width, height, left, top, is_stated = row
        if left < 0 and not is_stated:
            return width, height
        size = cls((width, height))
        size.crop, size.is_stated = (left, top) if left >= 0 else None, bool(is_stated)
        return size

    @staticmethod
    def row_of(size: Size) -> list[int]:
        """What `from_row` makes the size of."""
        crop = getattr(size, "crop", None) or (-1, -1)
        return [*size, *crop, getattr(size, "is_stated", False)]

    @classmethod
    def from_placement(cls, placement: Placement, is_stated: npt.ArrayLike = False) -> list[Size]:
        """The resized size of each image, with its cut where a focus moves that out of the middle.

        Args:
            is_stated: [N] or for all of them, whether metadata states the image's own size.
        """
        rows = np.full((len(placement.resized_sizes), 5), -1, dtype=np.int32)
        rows[:, :2], rows[:, 4] = placement.resized_sizes, is_stated
        if placement.crops is not None:
            middle = cut_pixels(placement.resized_sizes, placement.bucket_sizes)[:, :2]
            moved = (placement.crops != middle).any(axis=1)
            rows[moved, 2:4] = placement.crops[moved]
        return list(map(cls.from_row, rows.tolist()))

    def crop_ltrb(self, bucket: Size) -> tuple[float, float, float, float]:
        """What SDXL is told of a cut that is not in the middle, see `buckets.focus.moved_crops`."""
        assert self.crop is not None
        (left, top), (width, height) = self.crop, bucket
        return float(left), float(top), float(2 * width - self[0] + left), float(2 * height - self[1] + top)


class SizedPath(str):
    """An image's path, with the size at which it is to be cached besides its own bucket's."""

    __slots__ = ("bucket",)
    bucket: Size


class InitialStep(int):
    """Updates that are trained already, of which the next one is in `epoch` (from 0), whatever is computed from them.

    A trainer multiplies the number of its first update by the accumulation, divides that by updates to get the first
    epoch, and takes whole epochs of batches off it, whose rest it believes to be the update again. With a plain number
    it lands in another epoch, and from the second epoch on its step numbers are too small, and too many updates
    follow (sd-scripts #2407). The place is known here, so those three have another result than with a plain number;
    `max_train_steps - initial_step` and what is counted on from here are plain.

    Attributes:
        taken_off: what was subtracted last.
    """

    epoch: int
    taken_off: Any = 0

    @classmethod
    def at(cls, update: int, epoch: int) -> InitialStep:
        initial_step = cls(update)
        initial_step.epoch = epoch
        return initial_step

    def __mul__(self, accumulation: Any) -> InitialStep:
        return self

    def __sub__(self, batches: Any) -> InitialStep:
        self.taken_off = batches
        return self

    def __floordiv__(self, updates_per_epoch: Any) -> int:
        return self.epoch
