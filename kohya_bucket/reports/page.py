"""The HTML report: what its script shows, and the file that holds both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from kohya_bucket._version import __version__
from kohya_bucket.buckets import Reason
from kohya_bucket.reports.analysis import Analysis
from kohya_bucket.reports.browser_rule import browser_rule, describe_rule
from kohya_bucket.reports.charts import aspect_histogram, size_scatter
from kohya_bucket.reports.one_file import SHARED_SCRIPTS, one_file
from kohya_bucket.reports.page_lists import image_lists, image_row
from kohya_bucket.reports.page_without_script import in_one_line, plain_report
from kohya_bucket.reports.recommend import recommend
from kohya_bucket.reports.thumbnails import caption_beside, choose_examples, make_thumbnails

__all__ = ["render_page"]

Progress = Callable[[int, int], None]

_SCRIPTS = [*SHARED_SCRIPTS, "report/size_chart.js", "report/panels.js", "report/report.js"]


def render_page(
    analyses: Sequence[Analysis],
    *,
    title: str = "",
    thumbnails: int = 240,
    limit: int = 300,
    progress: Progress | None = None,
) -> str:
    """The report of one or several data sets as the text of an HTML file.

    Args:
        title: heading of the page; the first data set's name if empty.
        thumbnails: at most this many small pictures in the file, over all data sets.
        limit: at most this many images in each list.
        progress: called as `progress(done, total)` while the small pictures are made.
    """
    title = title or (analyses[0].subject.name if analyses else "No images")
    share = max(0, thumbnails) // max(len(analyses), 1)
    examples = [choose_examples(a, share) for a in analyses]
    chosen = [a.images.paths[i] for a, e in zip(analyses, examples, strict=True) for _, some in e for i in some]
    pictures = iter(make_thumbnails(chosen, progress))
    data = {
        "title": title,
        "version": __version__,
        "made": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "reasons": {int(r): r.text for r in Reason},
        "datasets": [
            {**_dataset(a, limit), "sheets": _sheets(a, e, pictures)} for a, e in zip(analyses, examples, strict=True)
        ],
    }
    about = in_one_line(analyses)
    return one_file(
        data,
        _SCRIPTS,
        ["shared/page.css"],
        title=f"{title}: {about} - kohya-bucket",
        about=f"kohya-bucket on {title}: {about}.",
        fallback=plain_report(analyses),
    )


def _dataset(analysis: Analysis, limit: int) -> dict[str, Any]:
    subject, images = analysis.subject, analysis.images
    return {
        "name": subject.name,
        "source": subject.source,
        "rule": browser_rule(subject.rule),
        "rule_text": describe_rule(subject.rule),
        "batch_size": subject.batch_size,
        "found": len(images),
        "broken": int((~images.readable).sum()),
        "summary": asdict(analysis.summary),
        "underfilled": len(analysis.underfilled),
        "rare": {"count": len(analysis.rarely_used), "below": analysis.min_count},
        "advice": [
            {k: getattr(r, k) for k in ("setting", "current", "proposed", "why", "gain", "cost")}
            for r in recommend(analysis)
        ],
        "histogram": aspect_histogram(analysis),
        "scatter": size_scatter(analysis),
        "buckets": [
            [
                *b.bucket, b.images, b.samples, b.batches, b.last_batch,
                round(b.mean_crop, 5), round(b.worst_crop, 5), round(b.enlarged, 4),
            ]
            for b in analysis.buckets
        ],
        "lists": image_lists(analysis, limit),
    }  # fmt: skip


def _sheets(analysis: Analysis, examples: Sequence[tuple[int, list[int]]], pictures: Any) -> list[dict[str, Any]]:
    out = []
    for k, chosen in examples:
        shots = []
        for i in chosen:
            picture = next(pictures)
            resized, bucket = analysis.placement.resized_sizes[i], analysis.placement.bucket_sizes[i]
            shots.append(
                {
                    "row": image_row(analysis, i, ""),
                    "picture": picture,
                    # Kept area as shares of the image: left, top, width, height.
                    "kept": [
                        *((resized - bucket) // 2 / resized).round(4).tolist(),
                        *(bucket / resized).round(4).tolist(),
                    ],
                    "caption": caption_beside(analysis.images.paths[i], analysis.images.captions),
                }
            )
        out.append({"bucket": k, "shots": shots})
    return out
