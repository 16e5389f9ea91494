"""SimpleTuner: the aspect rounded to two decimals, at one pixel count, each side rounded to the alignment.

Source: bghira/SimpleTuner, `helpers/multiaspect/image.py` and `helpers/image_manipulation/training_sample.py`, for
`resolution_type` area or pixel_area and no square crop. The trainer also remembers the first size it computed for
each rounded aspect of a bucket; two sizes with the same rounded aspect then become one, depending on the order of
images. Here the order decides nothing, so such images keep their own size.
"""

from __future__ import annotations

import math

import numpy as np

from kohya_bucket.buckets.sizes import FloatArray
from kohya_bucket.buckets.trainers.base import DataTrainer, SizeColumns, positive, round_to_multiple

__all__ = ["SimpleTunerBuckets"]


class SimpleTunerBuckets(DataTrainer):
    """One bucket per rounded aspect that occurs.

    Args:
        resolution: side in pixels; 1024 stands for `resolution = 1024` with `resolution_type = "pixel_area"`.
        alignment: `aspect_bucket_alignment`; every side is rounded to a multiple of it, and at least that.
    """

    def __init__(self, resolution: int = 1024, alignment: int = 64) -> None:
        positive(resolution=resolution, alignment=alignment)
        self.resolution, self.alignment = resolution, alignment
        self._edge = max(round_to_multiple(int(math.sqrt(resolution * resolution / 1e6 * 1e6)), alignment), alignment)

    def _sizes(self, width: FloatArray, height: FloatArray) -> SizeColumns:
        ratio = width / height
        # numpy rounds by scaling, Python correctly; each different aspect is rounded once, as Python does it.
        values, inverse = np.unique(ratio, return_inverse=True)
        aspects, back = np.unique([round(float(a), 2) for a in values], return_inverse=True)
        sizes = np.array([self._size(float(a)) for a in aspects]).reshape(-1, 2)
        chosen = sizes[back.reshape(-1)[inverse.reshape(-1)]]
        return chosen[:, 0], chosen[:, 1]

    def _size(self, aspect: float) -> tuple[int, int]:
        if aspect == 0:  # narrower than 1:200, which the trainer divides by
            return 0, 0
        root, step = math.sqrt(aspect), self.alignment
        width, height = (max(round_to_multiple(side, step), step) for side in (self._edge * root, self._edge / root))
        return (self._edge, self._edge) if round(width / height, 2) == 1.0 else (width, height)
