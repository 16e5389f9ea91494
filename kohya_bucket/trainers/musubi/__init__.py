"""The adapter: this package's plans behind musubi-tuner's own classes."""

from kohya_bucket.trainers.musubi.door import install, is_active, left_alone, uninstall, why_inactive

__all__ = ["install", "is_active", "left_alone", "uninstall", "why_inactive"]
