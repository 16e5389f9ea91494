"""The adapter: this package's buckets and plans behind sd-scripts' own classes."""

from kohya_bucket.sdscripts.door import install, is_active, left_alone, refusal, uninstall

__all__ = ["install", "is_active", "left_alone", "refusal", "uninstall"]
