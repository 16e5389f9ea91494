"""The lists of the report's page, as rows of plain values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.images.headers import ORIENTATIONS
from kohya_bucket.reports.analysis import Analysis

__all__ = ["image_lists", "image_row"]


def image_lists(analysis: Analysis, limit: int) -> list[dict[str, Any]]:
    """Lists of images that stand out, each with the first `limit`: title, count, rows, a line about it."""
    images = analysis.images

    def rows(indices: npt.NDArray[np.intp], note: Callable[[int], str] | None = None) -> list[list[Any]]:
        return [image_row(analysis, i, note(i) if note else "") for i in indices[:limit].tolist()]

    out = [
        ("Cropped most", len(analysis.most_cropped), rows(analysis.most_cropped), "Largest share cut off first."),
        ("Enlarged most", len(analysis.most_enlarged), rows(analysis.most_enlarged), "Smaller than their bucket."),
        (
            "Far from every bucket", len(analysis.outliers), rows(analysis.outliers),
            f"Images whose aspect differs from their bucket's by more than a factor of "
            f"{math.exp(analysis.outlier_threshold):.2f}: often a mistake in the data.",
        ),
        (
            "Without a bucket", len(analysis.unplaced), rows(analysis.unplaced, analysis.reason),
            "These are not trained.",
        ),
        (
            "Asking for a rotation", len(analysis.rotated),
            rows(analysis.rotated, lambda i: ORIENTATIONS.get(int(images.orientation[i]), "")),
            "Their EXIF asks for it; training takes the pixels as they are stored.",
        ),
    ]  # fmt: skip
    lists = [
        {"title": title, "count": count, "rows": listed, "about": about, "kind": "images"}
        for title, count, listed, about in out
    ]
    for title, notes, about in (
        ("Broken", images.failures, "No size could be read from these; they are not trained."),
        ("Named wrongly", images.mislabelled, "They load anyway."),
    ):
        some = sorted(notes.items())
        listed = [[images.short_name(i), why] for i, why in some[:limit]]
        lists.append({"title": title, "count": len(some), "rows": listed, "about": about, "kind": "notes"})
    groups = analysis.duplicates
    if groups is not None:
        listed = [
            [f"{len(g)} × {images.short_name(g[0])}", ", ".join(images.short_name(i) for i in g[1:20])]
            for g in groups[:limit]
        ]
        about = "Files of equal content; each copy is trained like an image of its own."
        lists.append({"title": "Equal files", "count": len(groups), "rows": listed, "about": about, "kind": "notes"})
    return lists


def image_row(analysis: Analysis, i: int, note: str) -> list[Any]:
    """[name, width, height, bucket index, crop loss, scale, note]; -1 where there is no bucket."""
    width, height = analysis.images.sizes[i].tolist()
    k = int(analysis.placement.bucket_index[i])
    if k < 0:
        return [analysis.images.short_name(i), width, height, -1, -1, -1, note]
    loss, scale = float(analysis.placement.crop_loss[i]), float(analysis.scale[i])
    return [analysis.images.short_name(i), width, height, k, round(loss, 5), round(scale, 4), note]
