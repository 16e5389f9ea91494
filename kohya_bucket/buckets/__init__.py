"""Which bucket sizes exist, and which one an image gets."""

from kohya_bucket.buckets.auto import AutoBuckets, generate_buckets
from kohya_bucket.buckets.by_name import rule_from_name
from kohya_bucket.buckets.exact import ExactBuckets
from kohya_bucket.buckets.fixed import FixedBuckets
from kohya_bucket.buckets.kohya import KohyaBuckets
from kohya_bucket.buckets.novelai import NovelAIBuckets
from kohya_bucket.buckets.presets import list_presets, load_preset
from kohya_bucket.buckets.set_files import bucket_set_to_toml, load_from_json, load_from_toml
from kohya_bucket.buckets.switching import SwitchingPoint, switching_points
from kohya_bucket.buckets.types import Bucket, BucketRule, BucketSet, Placement, Reason

__all__ = [
    "AutoBuckets",
    "Bucket",
    "BucketRule",
    "BucketSet",
    "ExactBuckets",
    "FixedBuckets",
    "KohyaBuckets",
    "NovelAIBuckets",
    "Placement",
    "Reason",
    "SwitchingPoint",
    "bucket_set_to_toml",
    "generate_buckets",
    "list_presets",
    "load_from_json",
    "load_from_toml",
    "load_preset",
    "rule_from_name",
    "switching_points",
]
