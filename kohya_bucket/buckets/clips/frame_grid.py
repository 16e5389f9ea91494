"""The numbers of frames that a video autoencoder takes: a base and multiples of its stride in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import BucketSettingsError

__all__ = ["FrameGrid"]


@dataclass(frozen=True)
class FrameGrid:
    """`stride * n + base` frames: 4n+1 for Wan and HunyuanVideo, 8n+1 for LTX-Video.

    Raises:
        BucketSettingsError: a stride or base below 1.
    """

    stride: int = 4
    base: int = 1

    def __post_init__(self) -> None:
        if min(self.stride, self.base) < 1:
            raise BucketSettingsError(f"a grid of {self} frames: the stride and the base must be 1 or more")

    def __str__(self) -> str:
        return f"{self.stride}n+{self.base}"

    def floor(self, frames: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """The largest number of the grid within each of `frames`, of the same shape; 0 where there is none."""
        array = np.asarray(frames, dtype=np.int64)
        return np.where(array < self.base, 0, (array - self.base) // self.stride * self.stride + self.base)

    def lengths(self, frames: Iterable[int]) -> tuple[int, ...]:
        """Lengths on the grid, ascending, each once, from those that somebody listed.

        Raises:
            BucketSettingsError: none is listed, or one is shorter than the grid's first.
        """
        listed = sorted({int(count) for count in frames})
        if not listed:
            raise BucketSettingsError("no number of frames is listed: name at least one, e.g. 1, 25, 45")
        if listed[0] < self.base:
            raise BucketSettingsError(f"{listed[0]} frames are listed, but the shortest clip of {self} has {self.base}")
        return tuple(dict.fromkeys(self.floor(listed).tolist()))

    def latent_frames(self, frames: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """How many latents stand for so many frames of the grid: one for the base, one for each stride."""
        array = np.asarray(frames, dtype=np.int64)
        return np.where(array < self.base, 0, (array - self.base) // self.stride + 1)
