"""The adapter: this package's buckets and plans behind sd-scripts' own classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.trainers.sdscripts.door import install, is_active, left_alone, uninstall, why_inactive
else:
    __getattr__ = importer(
        __name__,
        {"kohya_bucket.trainers.sdscripts.door": ["install", "is_active", "left_alone", "uninstall", "why_inactive"]},
    )

__all__ = ["install", "is_active", "left_alone", "uninstall", "why_inactive"]
