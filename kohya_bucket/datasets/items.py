"""One training item from pixels and a bucket: the same for files, tables, tars and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import numpy as np
import torch

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.buckets.rule import BucketRule, check_rule
from kohya_bucket.datasets.collate import Item
from kohya_bucket.datasets.tensors import PixelRange, check_pixel_range, shrink_fast, to_unit_tensor
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import MetadataCache
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels import Fit, Picture
from kohya_bucket.images.resize import choose_interpolation, resize_and_crop

__all__ = [
    "DECODING", "DatasetKeywords", "ItemKeywords", "Transform", "build_item", "check_settings", "cover_size",
]  # fmt: skip

Transform = Callable[[torch.Tensor], torch.Tensor]
DECODING = ("exact", "fast")
_BY_AREA = ("auto", "auto-0.9", "area")


class ItemKeywords(TypedDict, total=False):
    """Keyword arguments of data sets from any source: what an item is made by."""

    transform: Transform | None
    pixel_range: PixelRange
    interpolation: str
    decode: str


class DatasetKeywords(ItemKeywords, total=False):
    """Keyword arguments of `BucketedDataset`, but for the captions."""

    metadata_cache: MetadataCache | None
    obey_exif: bool
    num_workers: int | None
    progress: Progress | None


def build_item(
    picture: Picture,
    bucket: Bucket,
    fit: Fit,
    *,
    path: str,
    caption: str,
    interpolation: str = "auto",
    transform: Transform | None = None,
    pixel_range: PixelRange = (-1, 1),
    fast: bool = False,
) -> Item:
    """The dict that `BucketedDataset` describes.

    Args:
        picture: pixels are [H, W, 3] uint8.
        fit: from the image's size to that which it is scaled to before the centre crop, both (width, height).
        fast: shrink with torch's filter in place of the area filter.

    Raises:
        KohyaBucketError: pixels of another shape or type, or `transform` returned nothing.
    """
    pixels = picture.pixels
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise KohyaBucketError(
            f"pixels of {path} are {pixels.dtype} of shape {list(pixels.shape)}, but must be uint8 [H, W, 3]"
        )
    size, scale = picture.size, picture.scale
    extent = None if scale == 1 else (size[0] / scale, size[1] / scale)
    shrink = shrink_fast if fast else None
    fitted = resize_and_crop(pixels, fit(size), bucket.as_tuple(), interpolation, extent=extent, shrink=shrink)
    tensor = to_unit_tensor(fitted, pixel_range)
    sides = np.array([bucket.width]), np.array([bucket.height])
    crop = geometry.crop_ltrb(*sides, np.array([bucket.aspect_ratio]), np.array([size[0] / size[1]]))
    image = tensor if transform is None else transform(tensor)
    if image is None:
        raise KohyaBucketError(f"transform returned None for {path}, but must return the image: does it end in return?")
    return Item(
        image=image,
        bucket=bucket,
        path=path,
        caption=caption,
        original_size=torch.tensor(size, dtype=torch.int64),
        crop_ltrb=torch.from_numpy(crop[0].astype(np.float32)),
    )


def check_settings(
    strategy: BucketRule, transform: object, pixel_range: object, interpolation: str, decode: str
) -> None:
    """Refuse what cannot work, before the sizes of a million images are read.

    Raises:
        KohyaBucketError: no rule; a transform that is neither None nor a function; a range of pixels, a filter or a
            decoding that does not exist, or two that do not go together.
    """
    check_rule(strategy)
    if transform is not None and not callable(transform):
        raise KohyaBucketError(f"transform is {transform!r}, but must be a function of a [3, H, W] tensor")
    check_pixel_range(pixel_range)
    choose_interpolation((1, 1), (1, 1), interpolation)
    if decode not in DECODING:
        raise KohyaBucketError(f"decode is {decode!r}, but must be one of {', '.join(DECODING)}")
    if decode == "fast" and interpolation not in _BY_AREA:
        raise KohyaBucketError(
            f"decode='fast' chooses the filter itself, but interpolation is {interpolation!r}: leave out one of them"
        )


def cover_size(size: tuple[int, int], bucket: Bucket) -> tuple[int, int]:
    """Size (width, height) that an image of `size` is scaled to so that it covers `bucket`."""
    width, height = np.array([size[0]], np.float64), np.array([size[1]], np.float64)
    sides = np.array([bucket.width], np.float64), np.array([bucket.height], np.float64)
    resized = geometry.cover_resize(width, height, width / height, *sides, np.array([bucket.aspect_ratio]))
    return int(resized[0][0]), int(resized[1][0])
