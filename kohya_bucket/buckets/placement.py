"""What a rule decides for N images, and why some have no bucket."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.bucket import Bucket, BucketSet
from kohya_bucket.buckets.geometry import cut_pixels
from kohya_bucket.buckets.sizes import FloatArray, IntArray


class Reason(enum.IntEnum):
    """Why an image has no bucket. `PLACED` (0) means that it has one."""

    PLACED = 0
    UNREADABLE = 1
    TOO_SMALL = 2
    ASPECT_ERROR = 3
    CROP_LIMIT = 4
    NOT_A_MULTIPLE = 5
    UNDERFILLED = 6
    NO_SMALLER_BUCKET = 7
    SIDE_LIMIT = 8
    TOO_LONG = 9
    TOO_SHORT = 10

    @property
    def text(self) -> str:
        return _REASON_TEXT[self]


_REASON_TEXT = {
    Reason.PLACED: "placed",
    Reason.UNREADABLE: "its size could not be read (broken, empty or not an image)",
    Reason.TOO_SMALL: "a side is shorter than one bucket step after resizing, so its bucket would have side 0",
    Reason.ASPECT_ERROR: "its aspect is further from every bucket than the limit allows",
    Reason.CROP_LIMIT: "every bucket would crop off more than the limit allows",
    Reason.NOT_A_MULTIPLE: "its size is not a multiple of the step, and resizing is off",
    Reason.UNDERFILLED: "its bucket holds fewer images than a batch, and such buckets are dropped",
    Reason.NO_SMALLER_BUCKET: "every bucket of the set is larger than it, and enlarging is off",
    Reason.TOO_LONG: "scaled to cover its bucket it would have a side of more than 2,147,483,647 pixels",
    Reason.TOO_SHORT: "it has fewer frames than the shortest length asked for",
    Reason.SIDE_LIMIT: "a side is outside the limits, and resizing or enlarging is off",
}


@dataclass(frozen=True, repr=False)
class Placement:
    """What a rule decides for N images, as arrays with one row per image.

    Attributes:
        bucket_set: the buckets that `bucket_index` counts in. For rules whose buckets come from the data
            (Kohya's no-upscale mode, exact sizes) these are the sizes that occur, sorted; otherwise the
            rule's whole set.
        bucket_index: [N] int32, position in `bucket_set`; -1 without a bucket.
        bucket_sizes: [N, 2] int32 pixels (width, height); 0 without a bucket.
        resized_sizes: [N, 2] int32 pixels the image is scaled to before the crop; 0 without a bucket.
        crop_ltrb: [N, 4] float64, the crop box that sd-scripts hands to SDXL as conditioning (computed
            from the bucket and the original size, not from the crop that is done, unless a focus moves that);
            0 without a bucket.
        aspect_errors: [N] float64, bucket aspect - image aspect; NaN without a bucket.
        crop_loss: [N] float64, share of the resized image's pixels that is cropped off; NaN without a bucket.
        reasons: [N] uint8 values of `Reason`.
        crops: [N, 2] int32 left and top of the crop in the resized image, where a focus decides them
            (`buckets/focus.py`); None: all crops are in the middle.

    Examples:
        >>> placement = KohyaBuckets(1024).place([(4000, 3000), (0, 0)])
        >>> print(placement.bucket(0), placement.resized_sizes[0].tolist(), placement.cuts[0].tolist())
        1152x896 [1195, 896] [21, 0, 22, 0]
        >>> placement.placed.tolist()
        [True, False]
        >>> placement.reason(1).text
        'its size could not be read (broken, empty or not an image)'
    """

    bucket_set: BucketSet | None
    bucket_index: IntArray
    bucket_sizes: IntArray
    resized_sizes: IntArray
    crop_ltrb: FloatArray
    aspect_errors: FloatArray
    crop_loss: FloatArray
    reasons: npt.NDArray[np.uint8]
    crops: IntArray | None = None

    def __len__(self) -> int:
        return len(self.bucket_index)

    @property
    def placed(self) -> npt.NDArray[np.bool_]:
        """[N] bool: the image has a bucket."""
        return self.bucket_index >= 0

    @property
    def images_per_bucket(self) -> npt.NDArray[np.int64]:
        """[K] images in each bucket of the set."""
        k = 0 if self.bucket_set is None else len(self.bucket_set)
        return np.bincount(self.bucket_index[self.placed], minlength=k).astype(np.int64)

    @property
    def cuts(self) -> IntArray:
        """[N, 4] pixels of the resized image that the crop takes off: left, top, right, bottom."""
        return cut_pixels(self.resized_sizes, self.bucket_sizes, self.crops)

    def select(self, rows: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Placement:
        """The placement of some of the images, by mask or by positions; the bucket set stays."""
        columns = [getattr(self, one.name) for one in fields(self)]
        chosen: list[Any] = [one[rows] if isinstance(one, np.ndarray) else one for one in columns]
        return Placement(*chosen)

    def bucket(self, i: int) -> Bucket | None:
        """Bucket of image `i`, or None."""
        k = int(self.bucket_index[i])
        return None if k < 0 or self.bucket_set is None else self.bucket_set[k]

    def reason(self, i: int) -> Reason:
        """Why image `i` has no bucket (`Reason.PLACED` if it has one)."""
        return Reason(int(self.reasons[i]))

    def __repr__(self) -> str:
        k = np.count_nonzero(self.images_per_bucket)
        return f"<{type(self).__name__} n={len(self)} placed={np.count_nonzero(self.placed)} n_buckets={k}>"
