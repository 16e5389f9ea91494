"""One-dimensional k-means by Lloyd's iteration on sorted values."""

from __future__ import annotations

import numpy as np

from kohya_bucket.buckets.sizes import FloatArray, IntArray

__all__ = ["kmeans_1d"]


def kmeans_1d(values: FloatArray, k: int, seed: int = 0, max_iter: int = 100) -> tuple[FloatArray, IntArray, int]:
    """Ascending centres, the number of values nearest to each, and the iterations that were needed.

    Starts from evenly spaced quantiles, so nothing is drawn; where quantiles coincide, as many different values
    as are missing are drawn with `seed`. Fewer centres come back where `values` has fewer different ones, or a
    centre lost all of its values.

    Args:
        values: [N] float64, N >= 1; their order decides nothing.
        k: number of centres, >= 1.
    """
    values = np.sort(values)
    distinct = np.unique(values)
    centres = np.unique(np.quantile(values, np.linspace(0.0, 1.0, k + 2)[1:-1]))
    missing = min(k, len(distinct)) - len(centres)
    if missing > 0:
        rest = np.setdiff1d(distinct, centres)
        extra = np.random.default_rng(seed).choice(rest, size=min(missing, len(rest)), replace=False)
        centres = np.union1d(centres, extra)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    iterations = 0
    for _ in range(max_iter):
        iterations += 1
        ends = np.concatenate([[0], np.searchsorted(values, (centres[1:] + centres[:-1]) / 2), [len(values)]])
        counts = np.diff(ends)
        filled = counts > 0
        moved = np.unique(np.diff(sums[ends])[filled] / counts[filled])
        if len(moved) == len(centres) and np.allclose(moved, centres, rtol=0, atol=1e-12):
            break
        centres = moved
    ends = np.concatenate([[0], np.searchsorted(values, (centres[1:] + centres[:-1]) / 2), [len(values)]])
    return centres, np.diff(ends).astype(np.int32), iterations
