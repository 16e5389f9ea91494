"""diffusers' DreamBooth scripts: the bucket with the least `|h * bucket_w - w * bucket_h|`, the last of equals.

Source: huggingface/diffusers, `training_utils.find_nearest_bucket` and `generate_aspect_ratio_buckets`. The measure
is the aspect distance times the bucket's height, so flat buckets attract more images than their aspect explains.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.buckets.trainers.base import SetTrainer, positive, round_to_multiple

__all__ = ["DiffusersBuckets"]

_ASPECTS = ((1, 1), (4, 5), (5, 4), (2, 3), (3, 2), (3, 4), (4, 3), (9, 16), (16, 9), (1, 2), (2, 1))


class DiffusersBuckets(SetTrainer):
    """Buckets as given on the command line, or generated for a resolution.

    Args:
        buckets: (width, height) pairs in their order, or a side in pixels for the scripts' eleven aspects at that
            pixel count. (The scripts write height first.)
        divisibility: generated sides are rounded to a multiple of this.
    """

    def __init__(self, buckets: int | Iterable[tuple[int, int]] = 1024, divisibility: int = 16) -> None:
        if isinstance(buckets, int):
            positive(resolution=buckets, divisibility=divisibility)
            dims: dict[tuple[int, int], None] = {}
            for across, down in _ASPECTS:
                height = (buckets * buckets / (across / down)) ** 0.5
                sides = (height * (across / down), height)
                width, height = (max(divisibility, round_to_multiple(side, divisibility)) for side in sides)
                dims[width, height] = None
            super().__init__(BucketSet.from_dims(dims, name="diffusers", vae_factor=divisibility))
        else:
            super().__init__(BucketSet.from_dims(buckets, name="diffusers"))

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        wide, high = width.astype(np.int64), height.astype(np.int64)
        best = np.full(len(wide), np.iinfo(np.int64).max)
        index = np.zeros(len(wide), dtype=np.int32)
        for k, bucket in enumerate(self.bucket_set):
            metric = np.abs(high * bucket.width - wide * bucket.height)
            better = metric <= best
            best[better], index[better] = metric[better], k
        return index
