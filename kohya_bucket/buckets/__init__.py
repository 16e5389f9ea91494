"""Which bucket sizes exist, and which one an image gets.

Names are imported when they are first used: the command line lists rules and trainers without their arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.buckets.bucket import Bucket, BucketSet
    from kohya_bucket.buckets.placement import Placement, Reason
    from kohya_bucket.buckets.rule import BucketRule
    from kohya_bucket.buckets.rules.auto import AutoBuckets, generate_buckets
    from kohya_bucket.buckets.rules.exact import ExactBuckets
    from kohya_bucket.buckets.rules.fixed import (
        FixedBuckets,
        assign_many,
        assign_many_indices,
        best_bucket,
        crop_loss,
    )  # fmt: skip
    from kohya_bucket.buckets.rules.kohya import KohyaBuckets
    from kohya_bucket.buckets.rules.novelai import NovelAIBuckets
    from kohya_bucket.buckets.rules.registry import rule_from_name
    from kohya_bucket.buckets.set_files import (
        bucket_set_to_toml,
        list_presets,
        load_from_json,
        load_from_toml,
        load_preset,
    )  # fmt: skip
    from kohya_bucket.buckets.switching import SwitchingPoint, switching_points
else:
    _HOMES = {
        "bucket": "Bucket BucketSet",
        "placement": "Placement Reason",
        "rule": "BucketRule",
        "rules.auto": "AutoBuckets generate_buckets",
        "rules.exact": "ExactBuckets",
        "rules.fixed": "FixedBuckets assign_many assign_many_indices best_bucket crop_loss",
        "rules.kohya": "KohyaBuckets",
        "rules.novelai": "NovelAIBuckets",
        "rules.registry": "rule_from_name",
        "set_files": "bucket_set_to_toml list_presets load_from_json load_from_toml load_preset",
        "switching": "SwitchingPoint switching_points",
    }
    __getattr__ = importer(__name__, {f"{__name__}.{home}": names.split() for home, names in _HOMES.items()})

__all__ = [
    "AutoBuckets", "Bucket", "BucketRule", "BucketSet", "ExactBuckets", "FixedBuckets", "KohyaBuckets",
    "NovelAIBuckets", "Placement", "Reason", "SwitchingPoint", "assign_many", "assign_many_indices", "best_bucket",
    "bucket_set_to_toml", "crop_loss", "generate_buckets", "list_presets", "load_from_json", "load_from_toml",
    "load_preset", "rule_from_name", "switching_points",
]  # fmt: skip


def __dir__() -> list[str]:
    return list(__all__)
