"""Advice about the images themselves: too long or too small ones, turned ones, unreadable ones, copies."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.misfits import MUCH_ENLARGED, too_long, too_small
from kohya_bucket.images.headers import say_orientations
from kohya_bucket.reports.analysis import Analysis
from kohya_bucket.reports.recommendation import Recommendation
from kohya_bucket.reports.summary import Summary, summarize
from kohya_bucket.reports.worth import differences
from kohya_bucket.texts import counted

__all__ = ["about_files", "bad_files", "misfits"]

Mask = npt.NDArray[np.bool_]


def about_files(analysis: Analysis) -> Iterator[Recommendation]:
    """Changes to the images themselves."""
    if analysis.images.failures:
        count, before = len(analysis.images.failures), analysis.summary
        yield Recommendation(
            "files", f"{count:,} unreadable", "repair, convert or remove", "They are not trained",
            f"{count:,} more images, or a clean log", "", before, before,
        )  # fmt: skip
    yield from _long(analysis)
    yield from _small(analysis)
    yield from _turned(analysis)
    yield from _copies(analysis)


def misfits(analysis: Analysis) -> Mask:
    """[N] images that are to be split, replaced or left out: too long or too small for any usual bucket."""
    return _too_long(analysis) | too_small(analysis.images.sizes, analysis.placement)


def bad_files(analysis: Analysis) -> list[str]:
    """Paths of all that cannot be trained, or not as it is: unreadable, without a bucket, too long, too small."""
    images = analysis.images
    bad = ~images.readable | misfits(analysis)
    bad[analysis.unplaced] = True
    return [images.paths[i] for i in np.flatnonzero(bad).tolist()]


def _too_long(analysis: Analysis) -> Mask:
    return too_long(analysis.images.sizes, analysis.placement, analysis.outlier_threshold)


def _long(analysis: Analysis) -> Iterator[Recommendation]:
    long = _too_long(analysis)
    if long.any():
        sizes, loss = analysis.images.sizes[long].astype(np.float64), analysis.placement.crop_loss[long]
        aspects = sizes.max(axis=1) / sizes.min(axis=1)
        yield _without(
            analysis, long, f"{_images(long)} far longer than a bucket", "split or leave out",
            f"They are {_span(aspects, '{:.1f}')} times as long as wide, and {loss.mean():.0%} of them is cut off",
        )  # fmt: skip


def _small(analysis: Analysis) -> Iterator[Recommendation]:
    small = too_small(analysis.images.sizes, analysis.placement)
    if small.any():
        yield _without(
            analysis, small, f"{_images(small)} enlarged more than {MUCH_ENLARGED:g} times",
            "replace by larger ones or leave out",
            f"Their sides are scaled up {_span(analysis.scale[small], '{:.3g}')} times, so blurred images are trained",
        )  # fmt: skip


def _turned(analysis: Analysis) -> Iterator[Recommendation]:
    images, before = analysis.images, analysis.summary
    turned = analysis.rotated
    if len(turned):
        sizes = np.where(images.orientation[:, None] >= 5, images.sizes[:, ::-1], images.sizes)
        placement = analysis.subject.rule.place(np.ascontiguousarray(sizes))
        after = summarize(sizes, placement, images.repeats, analysis.subject.batch_size)
        moved = int((placement.bucket_sizes != analysis.placement.bucket_sizes).any(axis=1).sum())
        yield Recommendation(
            "files", f"{len(turned):,} turned or mirrored by EXIF", "turn the pixels, drop the EXIF tag",
            f"Training ignores the tag ({say_orientations(images.orientation[turned].tolist())})",
            f"trained as they are seen, {moved:,} of them in another bucket", "", before, after,
        )  # fmt: skip


def _copies(analysis: Analysis) -> Iterator[Recommendation]:
    duplicates = analysis.duplicates
    if duplicates:
        spare = np.zeros(len(analysis.images), dtype=np.bool_)
        spare[[i for group in duplicates for i in group[1:]]] = True
        after = _summary_without(analysis, spare)
        yield Recommendation(
            "files", f"{int(spare.sum()):,} copies", "keep one of each group",
            f"{counted(len(duplicates), 'image', 'is', 'are')} there more than once, and trained that much more often",
            _samples(analysis.summary, after), "", analysis.summary, after,
        )  # fmt: skip


def _without(analysis: Analysis, left_out: Mask, current: str, proposed: str, why: str) -> Recommendation:
    before, after = analysis.summary, _summary_without(analysis, left_out)
    gain, cost = differences(before, after)
    cost = "; ".join(filter(None, (_samples(before, after), cost)))
    return Recommendation("files", current, proposed, why, gain, cost, before, after)


def _summary_without(analysis: Analysis, left_out: Mask) -> Summary:
    images, subject = analysis.images, analysis.subject
    sizes = np.ascontiguousarray(images.sizes[~left_out])
    return summarize(sizes, subject.rule.place(sizes), images.repeats[~left_out], subject.batch_size)


def _samples(before: Summary, after: Summary) -> str:
    return f"samples per epoch {before.samples:,} → {after.samples:,}"


def _images(chosen: Mask) -> str:
    return counted(int(chosen.sum()), "image")


def _span(values: npt.NDArray[np.float64], form: str) -> str:
    low, high = form.format(values.min()), form.format(values.max())
    return low if low == high else f"{low} to {high}"
