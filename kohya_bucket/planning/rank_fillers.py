"""What is trained once more so that every rank has an image."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.demand import Change
from kohya_bucket.planning.mixed_steps import MixedSteps

__all__ = ["rank_fillers"]


def rank_fillers(
    items: npt.NDArray[np.int32],
    start: npt.NDArray[np.int64],
    length: npt.NDArray[np.int32],
    bucket_of_step: npt.NDArray[np.int32],
    mixed: MixedSteps,
    world_size: int,
) -> Change:
    """What steps with fewer images than ranks train again: the first rank left over the first image, and so on.

    The arguments are those of `EpochPlan`.
    """
    short = np.flatnonzero(length < world_size)
    own = length[short].astype(np.int64)
    extra = world_size - own
    spare = np.arange(int(extra.sum())) - np.repeat(np.cumsum(extra) - extra, extra)
    spare %= np.repeat(own, extra)
    bucket = np.repeat(bucket_of_step[short], extra)
    several = np.flatnonzero(bucket < 0)  # there, each rank has one image or none
    bucket[several] = mixed.bucket[-1 - bucket[several], spare[several]]
    return Change(items[np.repeat(start[short], extra) + spare], bucket, bucket, 1)
