"""The adapter: this package's plans behind anima_lora's own datasets."""

from kohya_bucket.trainers.anima_lora.door import install, is_active, left_alone, uninstall, why_inactive

__all__ = ["install", "is_active", "left_alone", "uninstall", "why_inactive"]
