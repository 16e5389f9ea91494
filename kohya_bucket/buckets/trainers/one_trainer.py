"""OneTrainer: nine aspects and their inverses at one pixel count; nearest height / width.

Source: Nerogar/mgds, `pipelineModules/AspectBucketing.py`, which OneTrainer uses with a quantization of 64 for most
models (8 for SD 1.5 and 2). Its list has Python's set order, which decides only exact ties; here it is ascending.
"""

from __future__ import annotations

import math

from kohya_bucket.buckets.arrays.nearest import AspectSwitch
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.buckets.trainers.base import SetTrainer, positive, round_to_multiple

__all__ = ["OneTrainerBuckets"]

_ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)


class OneTrainerBuckets(SetTrainer):
    """Nearest aspect counted as height / width, so portrait is finer than landscape, the other way than Kohya's.

    Args:
        resolution: side in pixels whose area every bucket has about.
        quantization: every side is rounded to a multiple of this.
    """

    def __init__(self, resolution: int = 1024, quantization: int = 64) -> None:
        positive(resolution=resolution, quantization=quantization)
        pairs = [(1.0 / math.sqrt(a) * resolution, a / math.sqrt(a) * resolution) for a in _ASPECTS]
        sizes = {tuple(round_to_multiple(side, quantization) for side in pair) for pair in pairs}
        sizes |= {(h, w) for w, h in sizes}
        super().__init__(BucketSet.from_dims(sorted(sizes), name="onetrainer", vae_factor=quantization))
        self._switch = AspectSwitch.nearest(self.bucket_set.sizes[:, 1] / self.bucket_set.sizes[:, 0])

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        return self._switch.index(height / width)
