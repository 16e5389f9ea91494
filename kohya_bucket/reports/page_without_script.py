"""The report for browsers that run no script: the key numbers, the buckets, and what is not trained."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kohya_bucket.reports.analysis import Analysis
from kohya_bucket.reports.browser_rule import describe_rule
from kohya_bucket.reports.one_file import markup_safe, table_markup
from kohya_bucket.texts import counted

__all__ = ["in_one_line", "plain_report"]

_MOST_ROWS = 100


def in_one_line(analyses: Sequence[Analysis]) -> str:
    """How many images, in how many buckets, and what is cut off of them."""
    images = sum(len(a.images) for a in analyses)
    buckets = sum(a.summary.buckets for a in analyses)
    placed = sum(int(a.placement.placed.sum()) for a in analyses)
    crop = sum(a.summary.mean_crop * int(a.placement.placed.sum()) for a in analyses) / max(placed, 1)
    return f"{counted(images, 'image')} in {counted(buckets, 'bucket')}, {crop:.1%} cut off on average"


def plain_report(analyses: Sequence[Analysis]) -> str:
    """Markup."""
    note = "Charts, small pictures and the field to try a size need JavaScript, but no network. The numbers do not:"
    return f'<div class="plain"><p>{note}</p>{"".join(map(_dataset, analyses))}</div>'


def _dataset(analysis: Analysis) -> str:
    subject, images = analysis.subject, analysis.images
    used = sorted(analysis.used_buckets, key=lambda b: -b.images)
    rows = [
        (
            str(b.bucket),
            f"{b.images:,}",
            f"{b.batches:,}",
            *(f"{x:.1%}" for x in (b.mean_crop, b.worst_crop, b.enlarged)),
        )
        for b in used[:_MOST_ROWS]
    ]
    head = ("Bucket", "Images", "Batches", "Cut off, mean", "Worst", "Enlarged")
    lost = [(images.short_name(i), why) for i, why in sorted(images.failures.items())]
    lost += [(images.short_name(i), analysis.reason(i)) for i in analysis.unplaced.tolist()]
    placement = analysis.placement
    cropped = [
        (images.short_name(i), str(placement.bucket(i)), f"{placement.crop_loss[i]:.1%}")
        for i in analysis.most_cropped[:_MOST_ROWS].tolist()
    ]
    return (
        f"<h1>{markup_safe(subject.name)}</h1><p>{markup_safe(describe_rule(subject.rule))}. "
        f"{markup_safe(in_one_line([analysis]))}.</p>"
        + _table("Buckets", head, rows, len(used))
        + _table("Not trained", ("Image", "Why"), lost[:_MOST_ROWS], len(lost))
        + _table("Cropped most", ("Image", "Bucket", "Cut off"), cropped, len(analysis.most_cropped))
    )


def _table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], count: int) -> str:
    if not count:
        return ""
    more = f", the first {_MOST_ROWS} of {count:,}" if count > _MOST_ROWS else ""
    return table_markup(caption + more, head, rows)
