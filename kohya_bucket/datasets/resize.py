"""One Pillow image as the tensor that a data set makes of it, for images that belong to none."""

from __future__ import annotations

import torch
from PIL import Image

from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.datasets.items import cover_size
from kohya_bucket.datasets.tensors import PixelRange, check_pixel_range, to_unit_tensor
from kohya_bucket.images.pixels import to_pixels
from kohya_bucket.images.resize import choose_interpolation, resize_and_crop

__all__ = ["BucketResize"]


class BucketResize:
    """Scales an image until it covers a bucket, and cuts the bucket out of its middle: [3, H, W] float32.

    Pixels are those of `BucketedDataset` with a `FixedBuckets` rule: of the same image, bucket and settings to the bit.

    Args:
        bucket: what is cut out.
        interpolation, pixel_range: as for `BucketedDataset`.

    Raises:
        KohyaBucketError: an interpolation or a range that does not exist.
        TypeError: what is called with is no Pillow image.
    """

    def __init__(self, bucket: Bucket, *, interpolation: str = "auto", pixel_range: PixelRange = (-1, 1)) -> None:
        choose_interpolation((1, 1), (1, 1), interpolation)
        self.bucket = bucket
        self.interpolation = interpolation
        self.pixel_range = check_pixel_range(pixel_range)

    def __call__(self, image: Image.Image) -> torch.Tensor:
        if not isinstance(image, Image.Image):
            raise TypeError(f"image is a {type(image).__name__}, but must be a Pillow image: Image.open(path)")
        resized = cover_size(image.size, self.bucket)
        fitted = resize_and_crop(to_pixels(image), resized, self.bucket.as_tuple(), self.interpolation)
        return to_unit_tensor(fitted, self.pixel_range)

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"<{name} {self.bucket} interpolation={self.interpolation!r} pixel_range={self.pixel_range}>"
