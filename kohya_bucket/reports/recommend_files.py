"""Advice about the images themselves: turned ones, unreadable ones, copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kohya_bucket.reports.analysis import Analysis
from kohya_bucket.reports.recommendation import Recommendation
from kohya_bucket.reports.summary import summarize

__all__ = ["about_files"]


def about_files(analysis: Analysis) -> Iterator[Recommendation]:
    """Changes to the images themselves."""
    images, before = analysis.images, analysis.summary
    swapped = images.orientation >= 5
    if swapped.any():
        sizes = np.where(swapped[:, None], images.sizes[:, ::-1], images.sizes)
        placement = analysis.subject.rule.place(np.ascontiguousarray(sizes))
        after = summarize(sizes, placement, images.repeats, analysis.subject.batch_size)
        moved = int((placement.bucket_sizes != analysis.placement.bucket_sizes).any(axis=1).sum())
        count = int(swapped.sum())
        yield Recommendation(
            "files", "1 lies on its side" if count == 1 else f"{count:,} lie on their side",
            "rotate the pixels, drop the EXIF tag",
            "Their EXIF asks for a quarter turn, which training ignores: they are trained lying on their side",
            f"trained upright, {moved:,} of them in another bucket", "", before, after,
        )  # fmt: skip
    if images.failures:
        yield Recommendation(
            "files", f"{len(images.failures):,} unreadable", "repair or remove them",
            "A file whose size cannot be read is not trained", f"{len(images.failures):,} more images, or a clean log",
            "", before, before,
        )  # fmt: skip
    duplicates = analysis.duplicates
    if duplicates:
        spare = [i for group in duplicates for i in group[1:]]
        keep = np.ones(len(images), dtype=np.bool_)
        keep[spare] = False
        sizes = np.ascontiguousarray(images.sizes[keep])
        placement = analysis.subject.rule.place(sizes)
        after = summarize(sizes, placement, images.repeats[keep], analysis.subject.batch_size)
        yield Recommendation(
            "files", f"{len(spare):,} copies", "keep one of each group",
            f"{len(duplicates):,} images are there more than once, and are trained that much more often",
            f"samples per epoch {before.samples:,} → {after.samples:,}", "", before, after,
        )  # fmt: skip
