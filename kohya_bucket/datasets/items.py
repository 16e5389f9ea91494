"""One training item from pixels and a bucket: the same for files, tables, tars and streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import torch

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.datasets.collate import Item
from kohya_bucket.datasets.tensors import to_unit_tensor
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import MetadataCache
from kohya_bucket.images.pixels.resize import resize_and_crop
from kohya_bucket.images.progress import Progress

__all__ = ["DatasetKeywords", "Transform", "build_item", "check_transform", "cover_size"]

Transform = Callable[[torch.Tensor], torch.Tensor]


class DatasetKeywords(TypedDict, total=False):
    """Keyword arguments of `BucketedDataset`, but for the captions."""

    transform: Transform | None
    metadata_cache: MetadataCache | None
    interpolation: str
    obey_exif: bool
    num_workers: int | None
    progress: Progress | None


def build_item(
    pixels: npt.NDArray[np.uint8],
    bucket: Bucket,
    resized_size: tuple[int, int] | None,
    *,
    path: str,
    caption: str,
    interpolation: str = "auto",
    transform: Transform | None = None,
) -> Item:
    """The dict that `BucketedDataset` describes.

    Args:
        pixels: [H, W, 3] uint8.
        resized_size: (width, height) to scale to before the centre crop; None: just large enough to cover.

    Raises:
        KohyaBucketError: pixels of another shape or type, or `transform` returned nothing.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise KohyaBucketError(
            f"pixels of {path} are {pixels.dtype} of shape {list(pixels.shape)}, but must be uint8 [H, W, 3]"
        )
    size = (pixels.shape[1], pixels.shape[0])
    fitted = resize_and_crop(pixels, resized_size or cover_size(size, bucket), bucket.as_tuple(), interpolation)
    tensor = to_unit_tensor(fitted)
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


def check_transform(transform: object) -> None:
    """Refuse what cannot be called, before the sizes of a million images are read.

    Raises:
        KohyaBucketError: it is neither None nor a function.
    """
    if transform is not None and not callable(transform):
        raise KohyaBucketError(f"transform is {transform!r}, but must be a function of a [3, H, W] tensor")


def cover_size(size: tuple[int, int], bucket: Bucket) -> tuple[int, int]:
    """Size (width, height) that an image of `size` is scaled to so that it covers `bucket`."""
    width, height = np.array([size[0]], np.float64), np.array([size[1]], np.float64)
    sides = np.array([bucket.width], np.float64), np.array([bucket.height], np.float64)
    resized = geometry.cover_resize(width, height, width / height, *sides, np.array([bucket.aspect_ratio]))
    return int(resized[0][0]), int(resized[1][0])
