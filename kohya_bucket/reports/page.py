"""The HTML report: what its script shows, the same for browsers that run none, and the file that holds both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

import numpy as np

from kohya_bucket._version import __version__
from kohya_bucket.buckets import Reason
from kohya_bucket.buckets.sizes import size_keys
from kohya_bucket.reports.analysis import FEW, Analysis
from kohya_bucket.reports.compare import trained_on
from kohya_bucket.reports.one_file import SHARED_SCRIPTS, markup_safe, one_file
from kohya_bucket.reports.pictures import Pictures, illustrate, image_row, shots, shown_images
from kohya_bucket.reports.recommend import recommend
from kohya_bucket.reports.rule_data import browser_rule, describe_rule
from kohya_bucket.texts import counted

_MOST_POINTS = 2500


def aspect_histogram(analysis: Analysis) -> dict[str, Any] | None:
    """Counts over log2 of the aspect, in 160 equal bins that are symmetric about the square.

    All bins cover at least 1:2 to 2:1. Aspects beyond the 0.1% at either end are counted in the outermost bins.
    """
    if not len(analysis.aspects):
        return None
    logs = np.log2(analysis.aspects)
    tails = np.abs(np.quantile(logs, [0.001, 0.999])).max()
    reach = float(np.clip(tails * 1.05, 1.0, 5.0))
    counts, _ = np.histogram(np.clip(logs, -reach, reach), bins=160, range=(-reach, reach))
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
    cells, resolution = sizes, 96.0
    while True:
        _, first, inverse, counts = np.unique(
            size_keys(cells), return_index=True, return_inverse=True, return_counts=True
        )
        if len(counts) <= _MOST_POINTS:
            break
        cells = np.rint(np.log2(sizes) * resolution).astype(np.int64)
        resolution *= 0.8
    with_bucket = np.bincount(inverse, weights=~np.isnan(loss))
    total = np.bincount(inverse, weights=np.nan_to_num(loss))
    mean = np.where(with_bucket > 0, total / np.maximum(with_bucket, 1), -1.0)
    rows = zip(sizes[first].tolist(), counts.tolist(), mean.tolist(), strict=True)
    return [[*size, n, round(m, 4)] for size, n, m in rows]


def image_lists(analysis: Analysis, limit: int) -> list[dict[str, Any]]:
    """Lists of images that stand out, each with the first `limit`: key, title, count, rows, a line about it."""
    images, out = analysis.images, []
    for some in analysis.lists:
        first = some.images[:limit]
        if some.notes_only:
            kind, rows = "notes", [[images.short_name(i), some.text(i)] for i in first]
        else:
            shown = some.key in ("without_bucket", "exif_rotated", "focus_cut")  # other texts are in the columns
            kind, rows = "images", [image_row(analysis, i, some.text(i) if shown else "") for i in first]
        out.append({"key": some.key, "title": some.title, "count": len(some.images), "rows": rows, "about": some.about,
                    "kind": kind})  # fmt: skip
    return out


_PLAIN = "Charts, small pictures and the field to try a size need JavaScript, but no network. The numbers do not:"
_MOST_ROWS = 100


def in_one_line(analyses: Sequence[Analysis]) -> str:
    """How many images, in how many buckets, and what is cut off of them."""
    summaries = [a.summary for a in analyses]
    placed = sum(s.placed for s in summaries)
    crop = sum(s.mean_crop * s.placed for s in summaries) / max(placed, 1)
    left = sum(len(a.images) for a in analyses) - placed
    more = f", and {left:,} that cannot be trained" if left else ""
    buckets = counted(sum(s.buckets for s in summaries), "bucket")
    what = "clip" if analyses and all(a.subject.clips is not None for a in analyses) else "image"
    return f"{counted(placed, what)} in {buckets}, {crop:.1%} cut off on average{more}"


def _plain_dataset(analysis: Analysis) -> str:
    subject, images = analysis.subject, analysis.images
    used = sorted(analysis.used_buckets, key=lambda b: -b.images)
    rows = [
        (b.bucket, f"{b.images:,}", f"{b.batches:,}", f"{b.mean_crop:.1%}", f"{b.worst_crop:.1%}", f"{b.enlarged:.1%}")
        for b in used[:_MOST_ROWS]
    ]
    head = ("Bucket", "Images", "Batches", "Cut off, mean", "Worst", "Enlarged")
    lost = [(images.short_name(i), analysis.reason(i)) for i in (*sorted(images.not_read), *analysis.unplaced.tolist())]
    placement = analysis.placement
    cropped = [
        (images.short_name(i), str(placement.bucket(i)), f"{placement.crop_loss[i]:.1%}")
        for i in analysis.most_cropped[:_MOST_ROWS].tolist()
    ]
    return (
        f"<h1>{markup_safe(subject.name)}</h1><p>{markup_safe(describe_rule(subject.rule))}. "
        f"{markup_safe(in_one_line([analysis]))}.</p>"
        + _plain_table("Buckets", head, rows, len(used))
        + _plain_table("Not trained", ("Image", "Why"), lost[:_MOST_ROWS], len(lost))
        + _plain_table("Cropped most", ("Image", "Bucket", "Cut off"), cropped, len(analysis.most_cropped))
    )


def _plain_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], count: int) -> str:
    if not count:
        return ""
    more = f", the first {_MOST_ROWS} of {count:,}" if count > _MOST_ROWS else ""
    top = "".join(f'<th scope="col">{markup_safe(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{markup_safe(first)}</th><td>{"</td><td>".join(map(_with_commands, cells))}</td></tr>'
        for first, *cells in rows
    )
    return (
        f"<table><caption>{markup_safe(caption + more)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


def _with_commands(text: object) -> str:
    return re.sub("`(kohya-bucket[^`]*)`", r"<code>\1</code>", markup_safe(text))


_SCRIPTS = [*SHARED_SCRIPTS, "report/size_chart.js", "report/panels.js", "report/report.js"]


def render_page(
    analyses: Sequence[Analysis],
    *,
    title: str = "",
    thumbnails: int = 240,
    limit: int = 300,
    pictures: Pictures | None = None,
) -> str:
    """The report of one or several datasets as the text of an HTML file.

    Args:
        title: heading of the page; the first dataset's name if empty.
        thumbnails: at most this many small pictures in the file, over all datasets; and of each dataset at most 20
            of images whose focus the middle crop would cut.
        limit: at most this many images in each list.
        pictures: those of `illustrate`; by default they are made here.
    """
    if pictures is None:
        analyses, pictures = illustrate(analyses, thumbnails)
    title = title or (analyses[0].subject.name if analyses else "No images")
    data = {
        "title": title,
        "version": __version__,
        "made": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "reasons": {int(r): r.text for r in Reason},
        "datasets": [
            {
                **_dataset(a, limit),
                "sheets": [{"bucket": k, "shots": shots(a, chosen, pictures)} for k, chosen in examples],
                "focus": a.focus_cuts and {"text": str(a.focus_cuts), "shots": shots(a, worst, pictures)},
            }
            for a, examples, worst in shown_images(analyses, thumbnails)
        ],
    }
    about = in_one_line(analyses)
    return one_file(
        data,
        _SCRIPTS,
        ["shared/page.css"],
        title=f"{title}: {about} - kohya-bucket",
        about=f"kohya-bucket on {title}: {about}.",
        fallback=f'<div class="plain"><p>{_PLAIN}</p>{"".join(map(_plain_dataset, analyses))}</div>',
    )


def _dataset(analysis: Analysis, limit: int) -> dict[str, Any]:
    subject, images = analysis.subject, analysis.images
    return {
        "name": subject.name,
        "source": subject.source,
        "rule": browser_rule(subject.rule),
        "rule_text": describe_rule(subject.rule),
        "batches_of": subject.batches_of,
        "clips": subject.clips and {"lines": subject.clips.lines(), "items": subject.clips.as_dict().get("items")},
        "found": len(images),
        "broken": len(images.failures),
        "not_listed": len(images.unlisted),
        "summary": asdict(analysis.summary),
        "underfilled": len(analysis.underfilled),
        "rare": {"count": len(analysis.rarely_used), "below": FEW},
        "advice": [
            {k: getattr(r, k) for k in ("setting", "current", "proposed", "why", "gain", "cost", "listed", "harm")}
            for r in recommend(analysis)
        ],
        "trainers": trained_on(analysis),
        "histogram": aspect_histogram(analysis),
        "scatter": size_scatter(analysis),
        "buckets": [
            [
                *b.bucket, b.images, b.samples, b.batches, b.last_batch,
                round(b.mean_crop, 5), round(b.worst_crop, 5), round(b.enlarged, 4), b.full_batch, b.underfilled,
            ]
            for b in analysis.buckets
        ],
        "lists": image_lists(analysis, limit),
    }  # fmt: skip
