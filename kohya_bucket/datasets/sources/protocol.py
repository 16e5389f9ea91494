"""What a source of images must be able to do."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.pixels import Fit, Picture

__all__ = ["FastSource", "ImageSource", "SourceSizes", "checked_sizes"]

_METHODS = ("__len__", "read_sizes", "pixels", "caption", "name")


class SourceSizes(NamedTuple):
    """Sizes of all images of a source, known without decoding one.

    Attributes:
        sizes: [N, 2] int32 pixels (width, height) of what `pixels` returns; (0, 0) where unreadable.
        failures: (index, name, reason) of each unreadable image.
    """

    sizes: npt.NDArray[np.int32]
    failures: list[tuple[int, str, str]]


class ImageSource(Protocol):
    """N images with captions, addressed by number. Must be picklable for worker processes."""

    def __len__(self) -> int: ...

    def read_sizes(self) -> SourceSizes:
        """Sizes of all N images."""

    def pixels(self, index: int) -> npt.NDArray[np.uint8]:
        """One image, [H, W, 3] uint8, which may be read-only. `KohyaBucketError` if it cannot be decoded."""

    def caption(self, index: int) -> str:
        """Its caption; "" where there is none."""

    def name(self, index: int) -> str:
        """Its path, or whatever else tells a person which image it is."""


class FastSource(ImageSource, Protocol):
    """What `decode="fast"` needs besides."""

    def picture(self, index: int, fit: Fit) -> Picture:
        """One image, [h, w, 3] uint8, perhaps at a fraction of its size; with `scale` 1 whole.

        `fit(size)` tells to what size (width, height) an image of `size` will be resized; [h, w] must not be below.
        """


def checked_sizes(source: ImageSource, decode: str = "exact") -> SourceSizes:
    """Sizes of a source that somebody else may have written.

    Raises:
        KohyaBucketError: it lacks a method, `picture` with `decode="fast"`, or gives another number of sizes.
    """
    names = (*_METHODS, "picture") if decode == "fast" else _METHODS
    if missing := [name for name in names if not hasattr(source, name)]:
        raise KohyaBucketError(f"source is a {type(source).__name__} without {', '.join(missing)}: see ImageSource")
    found = source.read_sizes()
    shape = np.shape(found[0])
    if shape != (len(source), 2):
        raise KohyaBucketError(
            f"read_sizes() of {type(source).__name__} gave sizes of shape {list(shape)} for {len(source)} images, but "
            "must give one (width, height) for each"
        )
    return SourceSizes(*found)
