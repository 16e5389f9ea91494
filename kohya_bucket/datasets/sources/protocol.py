"""What a source of images must be able to do."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["ImageSource", "SourceSizes"]


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
        """One image, [H, W, 3] uint8. `KohyaBucketError` if it cannot be decoded."""

    def caption(self, index: int) -> str:
        """Its caption; "" where there is none."""

    def name(self, index: int) -> str:
        """Its path, or whatever else tells a person which image it is."""
