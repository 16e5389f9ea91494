"""Which bucket sizes exist, and which one an image gets.

Names are imported when they are first used: the command line lists rules and trainers without their arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import lazy_names

if TYPE_CHECKING:
    from kohya_bucket.buckets.bucket import Bucket as Bucket
    from kohya_bucket.buckets.bucket import BucketSet as BucketSet
    from kohya_bucket.buckets.placement import Placement as Placement
    from kohya_bucket.buckets.placement import Reason as Reason
    from kohya_bucket.buckets.rule import BucketRule as BucketRule
    from kohya_bucket.buckets.rules.auto import AutoBuckets as AutoBuckets
    from kohya_bucket.buckets.rules.auto import generate_buckets as generate_buckets
    from kohya_bucket.buckets.rules.exact import ExactBuckets as ExactBuckets
    from kohya_bucket.buckets.rules.fixed import FixedBuckets as FixedBuckets
    from kohya_bucket.buckets.rules.kohya import KohyaBuckets as KohyaBuckets
    from kohya_bucket.buckets.rules.novelai import NovelAIBuckets as NovelAIBuckets
    from kohya_bucket.buckets.rules.registry import rule_from_name as rule_from_name
    from kohya_bucket.buckets.set_files import bucket_set_to_toml as bucket_set_to_toml
    from kohya_bucket.buckets.set_files import list_presets as list_presets
    from kohya_bucket.buckets.set_files import load_from_json as load_from_json
    from kohya_bucket.buckets.set_files import load_from_toml as load_from_toml
    from kohya_bucket.buckets.set_files import load_preset as load_preset
    from kohya_bucket.buckets.switching import SwitchingPoint as SwitchingPoint
    from kohya_bucket.buckets.switching import switching_points as switching_points
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {
        "bucket": "Bucket BucketSet",
        "placement": "Placement Reason",
        "rule": "BucketRule",
        "rules.auto": "AutoBuckets generate_buckets",
        "rules.exact": "ExactBuckets",
        "rules.fixed": "FixedBuckets",
        "rules.kohya": "KohyaBuckets",
        "rules.novelai": "NovelAIBuckets",
        "rules.registry": "rule_from_name",
        "set_files": "bucket_set_to_toml list_presets load_from_json load_from_toml load_preset",
        "switching": "SwitchingPoint switching_points",
    })  # fmt: skip
