"""Which bucket sizes exist, and which one an image gets.

Names are imported when they are first used: the command line lists rules and trainers without their arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.lazy import importer

if TYPE_CHECKING:
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
else:
    __getattr__ = importer(
        __name__,
        {
            "kohya_bucket.buckets.auto": ["AutoBuckets", "generate_buckets"],
            "kohya_bucket.buckets.by_name": ["rule_from_name"],
            "kohya_bucket.buckets.exact": ["ExactBuckets"],
            "kohya_bucket.buckets.fixed": ["FixedBuckets"],
            "kohya_bucket.buckets.kohya": ["KohyaBuckets"],
            "kohya_bucket.buckets.novelai": ["NovelAIBuckets"],
            "kohya_bucket.buckets.presets": ["list_presets", "load_preset"],
            "kohya_bucket.buckets.set_files": ["bucket_set_to_toml", "load_from_json", "load_from_toml"],
            "kohya_bucket.buckets.switching": ["SwitchingPoint", "switching_points"],
            "kohya_bucket.buckets.types": ["Bucket", "BucketRule", "BucketSet", "Placement", "Reason"],
        },
    )

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


def __dir__() -> list[str]:
    return list(__all__)
