"""The adapter: this package's plans behind ai-toolkit's own datasets."""

from kohya_bucket.trainers.ai_toolkit.door import install, is_active, left_alone, uninstall, why_inactive

__all__ = ["install", "is_active", "left_alone", "uninstall", "why_inactive"]
