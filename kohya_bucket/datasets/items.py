"""One training item from pixels and a bucket; batches are made by torch's `default_collate`, which may be extended."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from kohya_bucket.buckets import geometry
from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.buckets.focus import moved_crops
from kohya_bucket.buckets.sizes import FloatArray, as_pair
from kohya_bucket.checks import one_of
from kohya_bucket.datasets.planned_index import ON_BAD_IMAGE
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import MetadataCache
from kohya_bucket.images.formats import UnreadableImageError
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.pixels import Pixels, to_pixels
from kohya_bucket.images.resize import require_filter, resize_and_crop, to_floats


class Item(dict[str, Any]):
    """One image of a dataset with all that belongs to it; `gathered` has the latents of its whole batch."""

    gathered: torch.Tensor | None = None


class Batch(dict[str, Any]):
    """A batch that a stream has put together."""


def register_bucket_collation() -> None:
    """Make `default_collate` know these types; done wherever a dataset is defined or unpickled."""
    default_collate_fn_map.update({Bucket: lambda batch, **_: list(batch), Item: _together, Batch: _refuse_batches})


def _together(batch: list[Item], *, collate_fn_map: Any = None) -> dict[str, Any]:
    first = batch[0]
    for other in batch[1:]:
        shape, another = (getattr(item.get("image"), "shape", None) for item in (first, other))
        if shape == another or shape is None or another is None:
            continue
        if first["bucket"] != other["bucket"]:
            raise KohyaBucketError(
                f"one batch holds {first['path']} of bucket {first['bucket']} and {other['path']} of bucket "
                f"{other['bucket']}: images of different buckets cannot be stacked, so draw batches with "
                "DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, batch_size=...))"
            )
        raise KohyaBucketError(
            f"transform returned shape {list(shape)} for {first['path']} and {list(another)} for {other['path']}, both "
            f"of bucket {first['bucket']}: images of a batch cannot be stacked unless it keeps shapes equal in a bucket"
        )
    whole = first.gathered
    together = whole is not None and len(whole) == len(batch) and all(item.gathered is whole for item in batch)
    ready = {"latents": whole} if together else {}
    return {
        name: ready[name] if name in ready else collate([item[name] for item in batch], collate_fn_map=collate_fn_map)
        for name in first
    }


def _refuse_batches(_: list[Batch], **__: Any) -> NoReturn:
    raise KohyaBucketError("this stream yields whole batches already: use DataLoader(stream, batch_size=None)")


PixelRange = tuple[float, float]


def check_pixel_range(pixel_range: Any) -> PixelRange:
    """(-1, 1), which VAEs of diffusion models take, or (0, 1), which torchvision's transforms start from;
    `KohyaBucketError` for any other."""
    with suppress(TypeError, ValueError):
        low, high = pixel_range
        if (low, high) in ((-1, 1), (0, 1)):
            return int(low), int(high)
    raise KohyaBucketError(f"pixel_range is {pixel_range!r}, but must be (-1, 1) or (0, 1); transform= makes any other")


def to_unit_tensor(pixels: npt.NDArray[np.uint8], pixel_range: PixelRange = (-1, 1)) -> torch.Tensor:
    """[H, W, 3] uint8 -> [3, H, W] float32; in [-1, 1] by `images.resize.to_floats`."""
    if pixel_range[0] == 0:
        return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1))).to(torch.float32).div_(255)
    tensor = torch.empty((3, *pixels.shape[:2]), dtype=torch.float32)
    to_floats(pixels, tensor.numpy())
    return tensor


Transform = Callable[[torch.Tensor], torch.Tensor]


class ItemKeywords(TypedDict, total=False):
    """Keyword arguments of datasets from any source: what an item is made by."""

    transform: Transform | None
    pixel_range: PixelRange
    interpolation: str
    on_bad_image: str


class DatasetKeywords(ItemKeywords, total=False):
    """Keyword arguments of `BucketedDataset`, except for the captions."""

    metadata_cache: MetadataCache | None
    focus: str | os.PathLike[str] | npt.ArrayLike | None
    obey_exif: bool
    num_workers: int | None
    progress: Progress | None


@dataclass(frozen=True)
class ItemSettings:
    """How items are made of images, see `BucketedDataset`.

    Raises:
        KohyaBucketError: a transform that is neither None nor a function; a range of pixels or a filter that does not
            exist; another way with bad images.
    """

    transform: Transform | None = None
    pixel_range: PixelRange = (-1, 1)
    interpolation: str = "auto"
    on_bad_image: str = "leave_out"

    def __post_init__(self) -> None:
        if self.transform is not None and not callable(self.transform):
            raise KohyaBucketError(f"transform is {self.transform!r}, but must be a function of a [3, H, W] tensor")
        check_pixel_range(self.pixel_range)
        one_of("on_bad_image", self.on_bad_image, ON_BAD_IMAGE, KohyaBucketError)
        require_filter(self.interpolation)

    def item(
        self, pixels: Pixels, bucket: Bucket, resized: tuple[int, int], path: str, caption: str,
        focus: FloatArray | None = None,
    ) -> Item:  # fmt: skip
        """The dict that `BucketedDataset` describes.

        Args:
            pixels: [H, W, 3] uint8.
            resized: (width, height) that the image is scaled to before the crop.
            focus: [1, 4] what the crop keeps, in shares; None or NaN: the crop is in the middle.

        Raises:
            KohyaBucketError: pixels of another shape or type, or `transform` returned nothing.
        """
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
            raise KohyaBucketError(
                f"pixels of {path} are {pixels.dtype} of shape {list(pixels.shape)}, but must be uint8 [H, W, 3]"
            )
        size, cut = (pixels.shape[1], pixels.shape[0]), None
        sides = np.array([bucket.width]), np.array([bucket.height])
        crop = geometry.crop_ltrb(*sides, np.array([bucket.aspect_ratio]), np.array([size[0] / size[1]]))
        if focus is not None and not np.isnan(focus).any():
            cuts, crop = moved_crops(focus, np.array([resized]), np.array([bucket.as_tuple()]), crop)
            cut = as_pair(cuts[0])
        fitted = resize_and_crop(pixels, resized, bucket.as_tuple(), self.interpolation, cut)
        tensor = to_unit_tensor(fitted, self.pixel_range)
        image = tensor if self.transform is None else self.transform(tensor)
        if image is None:
            raise KohyaBucketError(
                f"transform returned None for {path}, but must return the image: does it end in return?"
            )
        return Item(
            image=image,
            bucket=bucket,
            path=path,
            caption=caption,
            original_size=torch.tensor(size, dtype=torch.int64),
            crop_ltrb=torch.from_numpy(crop[0].astype(np.float32)),
        )


def check_size(pixels: Pixels, size: tuple[int, int]) -> None:
    """Raises `UnreadableImageError` for an image whose bucket was chosen for another (width, height), since it has
    changed or its size was stated wrongly: most of it might be cut off."""
    height, width = pixels.shape[:2]
    if (width, height) != size:
        raise UnreadableImageError(f"{width}x{height} pixels, but {size[0]}x{size[1]} when its bucket was chosen")


def cover_size(size: tuple[int, int], bucket: Bucket) -> tuple[int, int]:
    """Size (width, height) that an image of `size` is scaled to so that it covers `bucket`."""
    return as_pair(geometry.covering_sizes(np.array([size]), np.array([bucket.as_tuple()]))[0])


class BucketResize:
    """Scales an image until it covers a bucket, and cuts the bucket out of its middle: [3, H, W] float32.

    Pixels are those of `BucketedDataset` with a `FixedBuckets` rule: of the same image, bucket and settings to the bit.

    Args:
        bucket: what is cut out.
        interpolation, pixel_range: as for `BucketedDataset`.

    Raises:
        KohyaBucketError: an interpolation or a range that does not exist.
        TypeError: called with something that is not a Pillow image.
    """

    def __init__(self, bucket: Bucket, *, interpolation: str = "auto", pixel_range: PixelRange = (-1, 1)) -> None:
        require_filter(interpolation)
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
