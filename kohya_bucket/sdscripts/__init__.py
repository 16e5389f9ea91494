"""The adapter: this package's buckets and plans behind sd-scripts' own classes."""

from kohya_bucket.sdscripts.hook import install, is_active, uninstall

__all__ = ["install", "is_active", "uninstall"]
