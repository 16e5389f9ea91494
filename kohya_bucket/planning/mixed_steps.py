"""Steps in which ranks train batches of several buckets: who trains what."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

__all__ = ["MixedSteps"]


def _none() -> npt.NDArray[np.int32]:
    return np.zeros((0, 1), dtype=np.int32)


@dataclass(frozen=True, eq=False)
class MixedSteps:
    """M steps of W ranks each; the images of a step stand rank after rank.

    Attributes:
        length: [M, W] int32 images of each rank's batch; 0 where there are fewer images than ranks, and a rank trains
            one of the step again.
        bucket: [M, W] int32 bucket of each rank.
    """

    length: npt.NDArray[np.int32] = field(default_factory=_none)
    bucket: npt.NDArray[np.int32] = field(default_factory=_none)

    def __len__(self) -> int:
        return len(self.length)

    @cached_property
    def offset(self) -> npt.NDArray[np.int64]:
        """[M, W] where in the step each rank's images begin."""
        begin = np.cumsum(self.length, axis=1, dtype=np.int64) - self.length
        own = np.count_nonzero(self.length, axis=1, keepdims=True)
        return np.where(self.length > 0, begin, np.arange(self.length.shape[1]) % np.maximum(own, 1))

    @property
    def images(self) -> npt.NDArray[np.int32]:
        """[M, W] images that each rank trains, an image that is trained again included."""
        return np.maximum(self.length, 1)

    @property
    def unequal(self) -> npt.NDArray[np.bool_]:
        """[M] whether images of different ranks would weigh differently."""
        own, world = np.count_nonzero(self.length, axis=1), self.length.shape[1]
        equal = (self.images == self.images[:, :1]).all(axis=1)
        unequal: npt.NDArray[np.bool_] = ~equal | (world % np.maximum(own, 1) > 0)
        return unequal

    def buckets_of_images(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """Bucket of every image of these steps, step after step and rank after rank."""
        return np.repeat(self.bucket[rows].reshape(-1), self.length[rows].reshape(-1))
