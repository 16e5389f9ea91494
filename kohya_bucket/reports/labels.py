"""Labels along an axis that do not overlap."""

from __future__ import annotations

import numpy as np

from kohya_bucket.buckets.sizes import FloatArray

__all__ = ["spread_labels"]


def spread_labels(wanted: FloatArray, gap: float, low: float, high: float) -> FloatArray:
    """Positions at least `gap` apart within low..high, as near to the ascending `wanted` ones as that allows.

    Minimises the sum of squared shifts (pooling of neighbours that would overlap). The caller makes sure that
    `(len(wanted) - 1) * gap` fits into the range.
    """
    n = len(wanted)
    if not n:
        return wanted
    offsets = np.arange(n) * gap
    # With the gaps taken off, the positions only have to be ascending.
    means: list[float] = []
    sizes: list[int] = []
    for value in wanted - offsets:
        means.append(float(value))
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            total = sizes[-2] + sizes[-1]
            means[-2] = (means[-2] * sizes[-2] + means[-1] * sizes[-1]) / total
            sizes[-2] = total
            means.pop()
            sizes.pop()
    flat = np.clip(np.repeat(means, sizes), low, high - offsets[-1])
    return np.asarray(flat + offsets)
