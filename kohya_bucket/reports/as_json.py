"""An analysis as plain data for `--json`. The format is stable: fields are added, never renamed or removed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket._version import __version__
from kohya_bucket.reports.analysis import Analysis, BucketUse
from kohya_bucket.reports.recommend import recommend

__all__ = ["analysis_as_dict", "report_as_dict"]

FORMAT = "kohya-bucket-analysis"
VERSION = 1


def report_as_dict(
    analyses: Sequence[Analysis], limit: int = 100, findings: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Everything `analyze` knows, ready for `json.dumps`; lists of images hold the first `limit`.

    `findings` are what is wrong with the config that named the images, if one did.
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "kohya_bucket": __version__,
        "findings": list(findings),
        "datasets": [analysis_as_dict(a, limit) for a in analyses],
    }


def analysis_as_dict(analysis: Analysis, limit: int = 100) -> dict[str, Any]:
    """One data set. Shares are between 0 and 1; numbers that do not exist are null."""
    images, subject = analysis.images, analysis.subject
    readable = images.readable
    sizes = images.sizes[readable]
    aspects = analysis.aspects
    duplicates = analysis.duplicates
    return {
        "name": subject.name,
        "rule": repr(subject.rule),
        "source": subject.source,
        "batch_size": subject.batch_size,
        "clips": None if subject.clips is None else subject.clips.as_dict(),
        "images": {
            "found": len(images),
            "readable": int(readable.sum()),
            "broken": int((~readable).sum()),
            "placed": analysis.summary.placed,
            "without_bucket": len(analysis.unplaced),
            "samples_per_epoch": analysis.summary.samples,
        },
        "aspects": {
            "min": _number(aspects.min() if len(aspects) else None),
            "median": _number(np.median(aspects) if len(aspects) else None),
            "max": _number(aspects.max() if len(aspects) else None),
            "mean_log": _number(analysis.aspect_summary.mean_log_ar),
            "median_log": _number(analysis.aspect_summary.median_log_ar),
            "std_log": _number(analysis.aspect_summary.std_log_ar),
            "portrait": int((sizes[:, 0] < sizes[:, 1]).sum()),
            "square": int((sizes[:, 0] == sizes[:, 1]).sum()),
            "landscape": int((sizes[:, 0] > sizes[:, 1]).sum()),
        },
        "summary": asdict(analysis.summary),
        "buckets": [_bucket(b) for b in analysis.buckets],
        "underfilled": [str(b.bucket) for b in analysis.underfilled],
        "rarely_used": {"fewer_than": analysis.min_count, "buckets": [str(b.bucket) for b in analysis.rarely_used]},
        "broken": _listed(
            [{"path": images.paths[i], "reason": why} for i, why in sorted(images.failures.items())], limit
        ),
        "without_bucket": _images(analysis, analysis.unplaced, limit, reason=True),
        "outliers": {"threshold": analysis.outlier_threshold, **_images(analysis, analysis.outliers, limit)},
        "most_cropped": _images(analysis, analysis.most_cropped, limit),
        "most_enlarged": _images(analysis, analysis.most_enlarged, limit),
        "exif_rotated": _images(analysis, analysis.rotated, limit),
        "mislabelled": _listed(
            [{"path": images.paths[i], "reason": why} for i, why in sorted(images.mislabelled.items())], limit
        ),
        "duplicates": None
        if duplicates is None
        else _listed([[images.paths[i] for i in group] for group in duplicates], limit),
        "recommendations": [asdict(r) for r in recommend(analysis)],
    }


def _bucket(use: BucketUse) -> dict[str, Any]:
    return {
        "width": use.bucket.width,
        "height": use.bucket.height,
        "aspect": use.bucket.aspect_ratio,
        "images": use.images,
        "samples": use.samples,
        "batches": use.batches,
        "last_batch": use.last_batch,
        "mean_crop": use.mean_crop if use.images else None,
        "worst_crop": use.worst_crop if use.images else None,
        "enlarged": use.enlarged if use.images else None,
        "underfilled": use.underfilled,
    }


def _images(analysis: Analysis, indices: npt.NDArray[np.intp], limit: int, reason: bool = False) -> dict[str, Any]:
    placement = analysis.placement
    rows = []
    for i in indices[:limit].tolist():
        width, height = analysis.images.sizes[i].tolist()
        row: dict[str, Any] = {"path": analysis.images.paths[i], "width": width, "height": height}
        bucket = placement.bucket(i)
        row["bucket"] = None if bucket is None else list(bucket)
        row["crop_loss"] = _number(placement.crop_loss[i])
        row["scale"] = _number(analysis.scale[i])
        row["orientation"] = int(analysis.images.orientation[i])
        if reason:
            row["reason"] = analysis.reason(i)
        rows.append(row)
    return {"count": len(indices), "listed": rows}


def _listed(rows: list[Any], limit: int) -> dict[str, Any]:
    return {"count": len(rows), "listed": rows[:limit]}


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else float(value)
