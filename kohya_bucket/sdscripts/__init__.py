"""The adapter: this package's buckets and plans behind sd-scripts' own classes."""

from kohya_bucket.sdscripts.door import install, is_active, left_alone, uninstall, why_inactive

__all__ = ["install", "is_active", "left_alone", "uninstall", "why_inactive"]
