"""ai-toolkit: the image's own size reduced to the area, each side floored or raised to the step.

Source: ostris/ai-toolkit, `toolkit/buckets.py`; the step is what the model asks for, 16 for most and 8 by default.
"""

from __future__ import annotations

import numpy as np

from kohya_bucket.buckets.sizes import FloatArray
from kohya_bucket.buckets.trainers.base import DataTrainer, SizeColumns, positive

__all__ = ["AIToolkitBuckets"]


class AIToolkitBuckets(DataTrainer):
    """Never enlarges by more than a step; one bucket per size that occurs.

    Args:
        resolution: side in pixels whose area no bucket exceeds (unless a side is shorter than a step).
        divisibility: every side is a multiple of this.
    """

    def __init__(self, resolution: int = 1024, divisibility: int = 16) -> None:
        positive(resolution=resolution, divisibility=divisibility)
        self.resolution, self.divisibility = resolution, divisibility

    def _sizes(self, width: FloatArray, height: FloatArray) -> SizeColumns:
        step, most = self.divisibility, self.resolution * self.resolution
        total = width * height
        target = np.minimum(total, most)
        scale = np.sqrt(target / total)
        down_w, up_w = (f(width * scale / step) * step for f in (np.floor, np.ceil))
        down_h, up_h = (f(height * scale / step) * step for f in (np.floor, np.ceil))
        # What is left where no candidate is within the area.
        best_w, best_h = np.maximum(down_w, step), np.maximum(down_h, step)
        least = np.full(len(width), np.inf)
        for w, h in ((down_w, down_h), (down_w, up_h), (up_w, down_h), (up_w, up_h)):
            distance = np.abs(w * h - target)
            better = (w > 0) & (h > 0) & (w * h <= most) & (distance < least)
            best_w[better], best_h[better], least[better] = w[better], h[better], distance[better]
        return best_w, best_h
