"""A plan as data, for `plan --json`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kohya_bucket.sdscripts.config import Config
from kohya_bucket.sdscripts.plan import DatasetOverview, Overview

__all__ = ["not_trained", "plan_as_dict"]


def plan_as_dict(read: Config, seen: Overview, images: bool) -> dict[str, Any]:
    """Everything `plan` knows, ready for `json.dumps`; with `images` also each image."""
    datasets = []
    for dataset in seen.datasets:
        config = dataset.read.config
        entry: dict[str, Any] = {
            "kind": config.kind.name.lower(),
            "resolution": config.resolution,
            "batch_size": config.batch_size,
            "enable_bucket": config.enable_bucket,
            "bucket_no_upscale": config.bucket_no_upscale,
            "images": len(dataset.images.keys),
            "samples": int(dataset.images.samples_per_bucket.sum()),
            "batches": dataset.images.batches,
            "validation_images": len(dataset.read.validation) if dataset.read.validation is not None else 0,
            "rotated_by_exif": len(dataset.turned),
            "buckets": [
                {**asdict(row), "bucket": row.bucket.as_tuple(), "aspect": row.bucket.aspect_ratio}
                | {"enlarged": up.images, "largest_enlargement": up.most}
                for row, up in zip(dataset.images.rows(), dataset.enlarged_per_bucket(), strict=True)
            ],
            "not_trained": [{"image": key, "reason": reason} for key, reason in not_trained(dataset)],
        }
        if images:
            entry["image_rows"] = [asdict(row) for row in dataset.image_rows()]
        datasets.append(entry)
    return {
        "config": str(read.path) if read.path else None,
        "settings": asdict(seen.options),
        "datasets": datasets,
        "gpus": [row.as_dict() for row in seen.gpus],
        "findings": [f.as_dict() for f in read.findings],
    }


def not_trained(dataset: DatasetOverview) -> tuple[tuple[str, str], ...]:
    """(image, reason) of those that no bucket takes, and of those that `skip_image_resolution` leaves out."""
    return dataset.left_out + dataset.read.images.skipped
