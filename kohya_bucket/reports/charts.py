"""Distributions, summed up so that a page stays small however many images there are."""

from __future__ import annotations

from typing import Any

import numpy as np

from kohya_bucket.reports.analysis import Analysis

__all__ = ["aspect_histogram", "size_scatter"]

_MOST_POINTS = 2500


def aspect_histogram(analysis: Analysis, bins: int = 160) -> dict[str, Any] | None:
    """Counts over log2 of the aspect, in equal bins that are symmetric about the square.

    All bins cover at least 1:2 to 2:1. Aspects beyond the 0.1% at either end are counted in the outermost bins.
    """
    if not len(analysis.aspects):
        return None
    logs = np.log2(analysis.aspects)
    tails = np.abs(np.quantile(logs, [0.001, 0.999])).max()
    reach = float(np.clip(tails * 1.05, 1.0, 5.0))
    counts, _ = np.histogram(np.clip(logs, -reach, reach), bins=bins, range=(-reach, reach))
    beyond = int((np.abs(logs) > reach).sum())
    return {"reach": reach, "counts": counts.tolist(), "beyond": beyond}


def size_scatter(analysis: Analysis) -> list[list[float]]:
    """Points [width, height, images, mean crop loss], crop loss -1 without a bucket; at most 2,500.

    Equal sizes are one point. Where there are still too many, sizes are rounded on a logarithmic grid.
    """
    readable = analysis.images.readable
    sizes = analysis.images.sizes[readable].astype(np.int64)
    if not len(sizes):
        return []
    loss = np.where(analysis.placement.placed, analysis.placement.crop_loss, np.nan)[readable]
    cells = sizes
    resolution = 96.0
    while True:
        _, first, inverse, counts = np.unique(
            cells[:, 0] << 32 | cells[:, 1], return_index=True, return_inverse=True, return_counts=True
        )
        if len(counts) <= _MOST_POINTS:
            break
        cells = np.rint(np.log2(sizes) * resolution).astype(np.int64)
        resolution *= 0.8
    has_bucket = ~np.isnan(loss)
    with_bucket = np.bincount(inverse, weights=has_bucket)
    total = np.bincount(inverse, weights=np.where(has_bucket, loss, 0.0))
    mean = np.where(with_bucket > 0, total / np.maximum(with_bucket, 1), -1.0)
    shown = sizes[first]
    return [
        [*map(int, row), int(n), round(float(m), 4)] for row, n, m in zip(shown.tolist(), counts, mean, strict=True)
    ]
