"""Which sizes in a `metadata_cache.json` may be believed: those of images that are as they were when it was written."""

from __future__ import annotations

import os

__all__ = ["is_stated_truly", "written_ns"]


def written_ns(cache_file: str) -> int:
    """When a `metadata_cache.json` was written, ns; 0 where there is none."""
    try:
        return os.stat(cache_file).st_mtime_ns  # noqa: PTH116
    except OSError:
        return 0


def is_stated_truly(image: str, written: int) -> bool:
    """Whether the size of an image that was noted at a time is to be believed.

    Not for WebP files, which imagesize 1.x reads one pixel short, nor for images that were edited since: they would be
    squeezed into the old shape. Of an image that is gone there is nothing better.
    """
    if image.lower().endswith(".webp"):
        return False
    try:
        return os.stat(image).st_mtime_ns <= written  # noqa: PTH116
    except OSError:
        return True
