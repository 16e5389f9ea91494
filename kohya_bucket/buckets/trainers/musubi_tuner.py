"""musubi-tuner: sd-scripts' idea with fewer buckets, and a no-upscale mode that only floors.

Source: kohya-ss/musubi-tuner, `dataset/bucket.py`, `BucketSelector`; the step is 16 for nearly every model.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kohya_bucket.buckets.arrays.nearest import AspectSwitch
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.buckets.trainers.base import DataTrainer, SetTrainer, positive

__all__ = ["MusubiTunerBuckets"]


class MusubiTunerBuckets(SetTrainer):
    """Widths from half the side up to the side, each with the tallest height in the area, and the transposes.

    Args:
        resolution: (width, height) in pixels whose area no bucket exceeds; an int means a square.
        steps: every side is a multiple of this.
        no_upscale: images within the area are only floored to the step, whatever their aspect.
    """

    def __init__(self, resolution: tuple[int, int] | int = 1024, steps: int = 16, no_upscale: bool = False) -> None:
        width, height = (resolution, resolution) if isinstance(resolution, int) else resolution
        positive(resolution=min(width, height), steps=steps)
        self.area, self.steps, self.no_upscale = width * height, steps, no_upscale
        side = int(math.sqrt(self.area))
        positive(half_the_side_in_steps=side // 2 // steps)
        widths = range(side // 2 - side // 2 % steps, side + steps, steps)
        pairs = [(w, self.area // w - self.area // w % steps) for w in widths]
        dims = sorted({*pairs, *((h, w) for w, h in pairs)})
        super().__init__(BucketSet.from_dims(dims, name="musubi-tuner", vae_factor=steps))
        self._switch = AspectSwitch.nearest(self.bucket_set.aspects)

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        return self._switch.index(width / height)

    def place(self, sizes: Any) -> Placement:
        """Place N images; with `no_upscale` the buckets are those that occur."""
        return _Floored(self).place(sizes) if self.no_upscale else super().place(sizes)

    def assign_many_indices(self, sizes: Any) -> IntArray:
        """[N] int32 positions in `bucket_set` (with `no_upscale`: in `place(sizes).bucket_set`); -1 for none."""
        return self.place(sizes).bucket_index if self.no_upscale else super().assign_many_indices(sizes)


class _Floored(DataTrainer):
    def __init__(self, rule: MusubiTunerBuckets) -> None:
        self._rule = rule

    def _sizes(self, width: FloatArray, height: FloatArray) -> tuple[Any, Any]:
        rule = self._rule
        chosen = rule.bucket_set.sizes[rule._nearest(width.astype(np.int32), height.astype(np.int32))]
        small = width * height <= rule.area
        sides = ((width, chosen[:, 0]), (height, chosen[:, 1]))
        return tuple(np.where(small, side - side % rule.steps, bucket) for side, bucket in sides)  # type: ignore[return-value]
