"""Aspect ratio bucketing: which bucket an image lands in, and which batches are trained.

Names are imported when they are first used, so `import kohya_bucket` needs neither torch nor pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket._version import __version__ as __version__
from kohya_bucket.extras import lazy_names

if TYPE_CHECKING:
    from kohya_bucket.buckets import AutoBuckets as AutoBuckets
    from kohya_bucket.buckets import BucketSet as BucketSet
    from kohya_bucket.buckets import ExactBuckets as ExactBuckets
    from kohya_bucket.buckets import FixedBuckets as FixedBuckets
    from kohya_bucket.buckets import KohyaBuckets as KohyaBuckets
    from kohya_bucket.buckets import NovelAIBuckets as NovelAIBuckets
    from kohya_bucket.buckets import Placement as Placement
    from kohya_bucket.buckets import list_presets as list_presets
    from kohya_bucket.buckets import load_preset as load_preset
    from kohya_bucket.buckets import rule_from_name as rule_from_name
    from kohya_bucket.datasets.accelerated import prepare_loader as prepare_loader
    from kohya_bucket.datasets.images import BucketedDataset as BucketedDataset
    from kohya_bucket.datasets.images import bucketed_loader as bucketed_loader
    from kohya_bucket.datasets.latents import BucketedLatentDataset as BucketedLatentDataset
    from kohya_bucket.datasets.sampler import BucketBatchSampler as BucketBatchSampler
    from kohya_bucket.datasets.streaming import StreamingBuckets as StreamingBuckets
    from kohya_bucket.datasets.webdataset import dataset_from_shards as dataset_from_shards
    from kohya_bucket.datasets.webdataset import stream_from_shards as stream_from_shards
    from kohya_bucket.errors import ConfigError as ConfigError
    from kohya_bucket.errors import KohyaBucketError as KohyaBucketError
    from kohya_bucket.errors import LatentStoreError as LatentStoreError
    from kohya_bucket.errors import PlanError as PlanError
    from kohya_bucket.errors import ResumeError as ResumeError
    from kohya_bucket.images import read_sizes as read_sizes
    from kohya_bucket.latents import VAEEncoder as VAEEncoder
    from kohya_bucket.latents import precompute_latents as precompute_latents
    from kohya_bucket.planning import EpochPlan as EpochPlan
    from kohya_bucket.planning import plan_epoch as plan_epoch
    from kohya_bucket.reports.preview import preview as preview
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {
        "buckets": "AutoBuckets BucketSet ExactBuckets FixedBuckets KohyaBuckets NovelAIBuckets Placement list_presets "
                   "load_preset rule_from_name",
        "datasets.accelerated": "prepare_loader",
        "datasets.images": "BucketedDataset bucketed_loader",
        "datasets.latents": "BucketedLatentDataset",
        "datasets.sampler": "BucketBatchSampler",
        "datasets.streaming": "StreamingBuckets",
        "datasets.webdataset": "dataset_from_shards stream_from_shards",
        "errors": "ConfigError KohyaBucketError LatentStoreError PlanError ResumeError",
        "images": "read_sizes",
        "latents": "VAEEncoder precompute_latents",
        "planning": "EpochPlan plan_epoch",
        "reports.preview": "preview",
    })  # fmt: skip
