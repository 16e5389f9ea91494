"""Aspect ratio bucketing: which bucket an image lands in, and which batches are trained.

Names are imported when they are first used, so `import kohya_bucket` needs neither torch nor pyarrow.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "kohya_bucket.buckets": [
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
    ],
    "kohya_bucket.datasets.images": ["BucketedDataset"],
    "kohya_bucket.datasets.latents": ["BucketedLatentDataset"],
    "kohya_bucket.datasets.sampler": ["BucketBatchSampler"],
    "kohya_bucket.errors": ["BucketSettingsError", "ConfigError", "InvalidBucketError", "KohyaBucketError"],
    "kohya_bucket.images": ["MetadataCache", "read_sizes"],
    "kohya_bucket.latents": ["VAEEncoder", "precompute_latents"],
    "kohya_bucket.planning": ["EpochPlan", "plan_epoch"],
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_EXTRA_OF = {"kohya_bucket.datasets": "torch", "kohya_bucket.latents": "train"}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'kohya_bucket' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as missing:
        extra = next((e for prefix, e in _EXTRA_OF.items() if home.startswith(prefix)), None)
        if extra is None or (missing.name or "").startswith("kohya_bucket"):
            raise
        raise ImportError(
            f"{name} needs {missing.name}, which is not installed: pip install 'kohya-bucket[{extra}]'"
        ) from missing


def __dir__() -> list[str]:
    return list(__all__)
