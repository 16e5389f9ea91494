"""Aspect ratio bucketing: which bucket an image lands in, and which batches are trained.

Names are imported when they are first used, so `import kohya_bucket` needs neither torch nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket._version import __version__
from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.buckets import (
        AutoBuckets,
        Bucket,
        BucketRule,
        BucketSet,
        ExactBuckets,
        FixedBuckets,
        KohyaBuckets,
        NovelAIBuckets,
        Placement,
        Reason,
        SwitchingPoint,
        assign_many,
        assign_many_indices,
        best_bucket,
        bucket_set_to_toml,
        crop_loss,
        generate_buckets,
        list_presets,
        load_from_json,
        load_from_toml,
        load_preset,
        rule_from_name,
        switching_points,
    )
    from kohya_bucket.datasets.accelerated import prepare_loader
    from kohya_bucket.datasets.images import BucketedDataset, bucketed_loader
    from kohya_bucket.datasets.items import BucketResize
    from kohya_bucket.datasets.latents import BucketedLatentDataset
    from kohya_bucket.datasets.sampler import BucketBatchSampler
    from kohya_bucket.datasets.streaming import StreamingBuckets
    from kohya_bucket.datasets.webdataset import dataset_from_shards, stream_from_shards
    from kohya_bucket.errors import BucketSettingsError, ConfigError, InvalidBucketError, KohyaBucketError
    from kohya_bucket.images import MetadataCache, MetadataRow, read_sizes
    from kohya_bucket.latents import VAEEncoder, precompute_latents
    from kohya_bucket.planning import EpochPlan, plan_epoch
    from kohya_bucket.reports.preview import NotTrained, Preview, PreviewBucket, preview
    from kohya_bucket.reports.summary import (
        aspect_ratio_summary,
        bucket_distribution,
        crop_loss_summary,
        underutilized_buckets,
    )
else:
    from kohya_bucket import buckets

    __getattr__ = importer(
        __name__,
        {
            "kohya_bucket.buckets": buckets.__all__,
            "kohya_bucket.reports.preview": ["NotTrained", "Preview", "PreviewBucket", "preview"],
            "kohya_bucket.datasets.accelerated": ["prepare_loader"],
            "kohya_bucket.datasets.images": ["BucketedDataset", "bucketed_loader"],
            "kohya_bucket.datasets.latents": ["BucketedLatentDataset"],
            "kohya_bucket.datasets.items": ["BucketResize"],
            "kohya_bucket.datasets.sampler": ["BucketBatchSampler"],
            "kohya_bucket.datasets.streaming": ["StreamingBuckets"],
            "kohya_bucket.datasets.webdataset": ["dataset_from_shards", "stream_from_shards"],
            "kohya_bucket.errors": ["BucketSettingsError", "ConfigError", "InvalidBucketError", "KohyaBucketError"],
            "kohya_bucket.images": ["MetadataCache", "MetadataRow", "read_sizes"],
            "kohya_bucket.latents": ["VAEEncoder", "precompute_latents"],
            "kohya_bucket.planning": ["EpochPlan", "plan_epoch"],
            "kohya_bucket.reports.summary": [
                "aspect_ratio_summary",
                "bucket_distribution",
                "crop_loss_summary",
                "underutilized_buckets",
            ],
        },
    )

__all__ = [
    "AutoBuckets",
    "Bucket",
    "BucketBatchSampler",
    "BucketResize",
    "BucketRule",
    "BucketSet",
    "BucketSettingsError",
    "BucketedDataset",
    "BucketedLatentDataset",
    "ConfigError",
    "EpochPlan",
    "ExactBuckets",
    "FixedBuckets",
    "InvalidBucketError",
    "KohyaBucketError",
    "KohyaBuckets",
    "MetadataCache",
    "MetadataRow",
    "NotTrained",
    "NovelAIBuckets",
    "Placement",
    "Preview",
    "PreviewBucket",
    "Reason",
    "StreamingBuckets",
    "SwitchingPoint",
    "VAEEncoder",
    "__version__",
    "aspect_ratio_summary",
    "assign_many",
    "assign_many_indices",
    "best_bucket",
    "bucket_distribution",
    "bucket_set_to_toml",
    "bucketed_loader",
    "crop_loss",
    "crop_loss_summary",
    "dataset_from_shards",
    "generate_buckets",
    "list_presets",
    "load_from_json",
    "load_from_toml",
    "load_preset",
    "plan_epoch",
    "precompute_latents",
    "prepare_loader",
    "preview",
    "read_sizes",
    "rule_from_name",
    "stream_from_shards",
    "switching_points",
    "underutilized_buckets",
]


def __dir__() -> list[str]:
    return list(__all__)
