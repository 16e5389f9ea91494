"""An analysis as JSON. The format is stable: fields are added, never renamed or removed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket._version import __version__
from kohya_bucket.buckets.misfits import FAR
from kohya_bucket.reports.analysis import FEW, Analysis, BucketUse
from kohya_bucket.reports.recommend import recommend
from kohya_bucket.trainers.door.subject import ImageTable


def report_as_dict(
    analyses: Sequence[Analysis], limit: int = 100, findings: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Everything `analyze` knows, ready for `json.dumps`; lists of images hold the first `limit`.

    `findings` are what is wrong with the config that named the images, if one did.
    """
    return {
        "format": "kohya-bucket-analysis",
        "version": 1,
        "kohya_bucket": __version__,
        "findings": list(findings),
        "datasets": [_analysis_as_dict(a, limit) for a in analyses],
    }


def _analysis_as_dict(analysis: Analysis, limit: int) -> dict[str, Any]:
    """One dataset. Shares are between 0 and 1; numbers that do not exist are null."""
    images, subject, aspects = analysis.images, analysis.subject, analysis.aspects
    readable = images.readable
    sizes = images.sizes[readable]
    duplicates = analysis.duplicates
    copies = None if duplicates is None else [[images.paths[i] for i in group] for group in duplicates]
    return {
        "name": subject.name,
        "rule": repr(subject.rule),
        "source": subject.source,
        "batch_size": None if subject.options.has_budget else subject.batch_size,
        "clips": None if subject.clips is None else subject.clips.as_dict(),
        "images": {
            "found": len(images),
            "readable": int(readable.sum()),
            "broken": len(images.failures),
            "not_listed": len(images.unlisted),
            "placed": analysis.summary.placed,
            "without_bucket": len(analysis.unplaced),
            "samples_per_epoch": None if subject.clips else analysis.summary.samples,
        },
        "aspects": {
            "min": _number(aspects.min()) if len(aspects) else None,
            "median": _number(np.median(aspects)) if len(aspects) else None,
            "max": _number(aspects.max()) if len(aspects) else None,
            "portrait": int((sizes[:, 0] < sizes[:, 1]).sum()),
            "square": int((sizes[:, 0] == sizes[:, 1]).sum()),
            "landscape": int((sizes[:, 0] > sizes[:, 1]).sum()),
        },
        "summary": asdict(analysis.summary),
        "buckets": [_bucket(b) for b in analysis.buckets],
        "underfilled": [str(b.bucket) for b in analysis.underfilled],
        "rarely_used": {"fewer_than": FEW, "buckets": [str(b.bucket) for b in analysis.rarely_used]},
        "broken": _reasons(images.failures, images, limit),
        "not_listed": _reasons(images.unlisted, images, limit),
        "misread": _reasons(images.misread, images, limit),
        "without_bucket": _images(analysis, analysis.unplaced, limit, reason=True),
        "outliers": {"threshold": FAR, **_images(analysis, analysis.outliers, limit)},
        "most_cropped": _images(analysis, analysis.most_cropped, limit),
        "most_enlarged": _images(analysis, analysis.most_enlarged, limit),
        "focus": None if analysis.focus_cuts is None else analysis.focus_cuts._asdict(),
        "exif_rotated": _images(analysis, analysis.rotated, limit),
        "mislabelled": _reasons(images.mislabelled, images, limit),
        "duplicates": None if copies is None else _listed(copies, limit),
        "recommendations": [asdict(r) for r in recommend(analysis)],
    }


def _bucket(use: BucketUse) -> dict[str, Any]:
    row = {"width": use.bucket.width, "height": use.bucket.height, "aspect": use.bucket.aspect_ratio, **vars(use)}
    row |= {} if use.images else dict.fromkeys(("mean_crop", "worst_crop", "enlarged"))
    del row["bucket"]
    return row | {"underfilled": use.underfilled}


def _images(analysis: Analysis, indices: npt.NDArray[np.intp], limit: int, reason: bool = False) -> dict[str, Any]:
    images, placement = analysis.images, analysis.placement
    rows = [
        {
            "path": images.paths[i],
            "width": int(images.sizes[i, 0]),
            "height": int(images.sizes[i, 1]),
            "bucket": [*(placement.bucket(i) or ())] or None,
            "crop_loss": _number(placement.crop_loss[i]),
            "scale": _number(analysis.scale[i]),
            "orientation": int(images.orientation[i]),
            **({"reason": analysis.reason(i)} if reason else {}),
        }
        for i in indices[:limit].tolist()
    ]
    return {"count": len(indices), "listed": rows}


def _reasons(reasons: Mapping[int, str], images: ImageTable, limit: int) -> dict[str, Any]:
    return _listed([{"path": images.paths[i], "reason": why} for i, why in sorted(reasons.items())], limit)


def _listed(rows: list[Any], limit: int) -> dict[str, Any]:
    return {"count": len(rows), "listed": rows[:limit]}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
