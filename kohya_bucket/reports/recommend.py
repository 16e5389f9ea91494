"""What to change, and what it would gain: every number comes from placing the same images again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kohya_bucket.reports.analysis import Analysis
from kohya_bucket.reports.changes import Change, Tried, changes
from kohya_bucket.reports.recommend_files import about_files, misfits
from kohya_bucket.reports.recommendation import Recommendation
from kohya_bucket.reports.summary import Summary, summarize
from kohya_bucket.reports.worth import differences, worth

__all__ = ["Recommendation", "recommend"]

_MANY = 0.25  # of the images: so many are no exceptions, and a setting may be what is wrong


def recommend(analysis: Analysis) -> list[Recommendation]:
    """Changes that are worth it for these images: of files first, then of settings, the most effective first.

    A setting is listed when it lowers the mean or the 95th percentile of crop loss, the share of enlarged images,
    of short batches or of images without a bucket, or trains more pixels, by a margin that matters, and by more
    than it costs elsewhere; or when the trainer refuses the value it has. All values that are proposed are such as the
    subject's trainer accepts. Settings are tried without the few images that the advice on files is to split or leave
    out, so that they are not bent for those.
    """
    if not analysis.summary.placed and not len(analysis.unplaced):
        return []
    return [*about_files(analysis), *_about_settings(analysis)]


def _about_settings(analysis: Analysis) -> list[Recommendation]:
    subject, images = analysis.subject, analysis.images
    odd = misfits(analysis)
    few = 0 < odd.sum() <= _MANY * analysis.summary.placed
    kept = ~odd if few else np.ones(len(images), dtype=np.bool_)
    sizes, repeats = np.ascontiguousarray(images.sizes[kept]), images.repeats[kept]

    def measured(change: Change) -> Summary:
        return summarize(sizes, change.rule.place(sizes), repeats, change.batch_size or subject.batch_size)

    unchanged = Change("", "", "", "", subject.rule)
    before = measured(unchanged) if few else analysis.summary
    beside = f"; measured without the {_files(int(odd.sum()))} above" if few else ""
    found: list[tuple[float, Recommendation]] = []
    for change in changes(Tried(sizes, subject.rule, subject.batch_size, subject.trainer, before)):
        after = measured(change)
        weight = worth(before, after)
        if weight > 0 or change.must:
            texts = change.setting, change.current, change.proposed, change.why + beside
            advice = Recommendation(*texts, *differences(before, after), before, after)
            found.append((np.inf if change.must else weight, advice))
    found.sort(key=lambda pair: -pair[0])
    return _each_once([advice for _, advice in found])


def _each_once(ranked: list[Recommendation]) -> list[Recommendation]:
    """The best for each setting, and of several that come to the same the first, which is the simplest."""
    out: list[Recommendation] = []
    for advice in ranked:
        if not any(other.setting == advice.setting or _equal(other, advice) for other in out):
            out.append(advice)
    return out


def _equal(one: Recommendation, other: Recommendation) -> bool:
    """They gain and cost the same, however many buckets stand empty."""
    return replace(one.after, buckets=0) == replace(other.after, buckets=0)


def _files(count: int) -> str:
    return "file" if count == 1 else f"{count:,} files"
