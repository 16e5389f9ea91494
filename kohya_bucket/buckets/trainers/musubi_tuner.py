"""musubi-tuner: sd-scripts' idea with fewer buckets, and a no-upscale mode that only floors.

Source: kohya-ss/musubi-tuner, `dataset/bucket.py`, `BucketSelector`; the step is 16 for nearly every model.
"""

from __future__ import annotations

import math

import numpy as np

from kohya_bucket.buckets.arrays.nearest import AspectSwitch
from kohya_bucket.buckets.bucket import BucketSet
from kohya_bucket.buckets.decision import Decision
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.buckets.trainers.base import SetTrainer, SizeColumns, decide_readable, positive

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
        self._resolution = width, height
        side = int(math.sqrt(self.area))
        positive(half_the_side_in_steps=side // 2 // steps)
        widths = range(side // 2 - side // 2 % steps, side + steps, steps)
        pairs = [(w, self.area // w - self.area // w % steps) for w in widths]
        dims = sorted({*pairs, *((h, w) for w, h in pairs)})
        super().__init__(BucketSet.from_dims(dims, name="musubi-tuner", vae_factor=steps))
        self._switch = AspectSwitch.nearest(self.bucket_set.aspects)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._resolution}, steps={self.steps}, no_upscale={self.no_upscale})"

    def _nearest(self, width: IntArray, height: IntArray) -> IntArray:
        return self._switch.index(width / height)

    def _decide(self, sizes: IntArray) -> Decision:
        return decide_readable(sizes, self._floored) if self.no_upscale else super()._decide(sizes)

    def _floored(self, width: FloatArray, height: FloatArray) -> SizeColumns:
        chosen = self.bucket_set.sizes[self._switch.index(width / height)]
        small = width * height <= self.area
        return (
            np.where(small, width - width % self.steps, chosen[:, 0]),
            np.where(small, height - height % self.steps, chosen[:, 1]),
        )
