"""Which sizes in a `metadata_cache.json` may be believed: those of images that are as they were when it was written."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kohya_bucket.images.scan import STAT, Job

__all__ = ["CACHE_FILE", "are_stated_truly", "written_ns"]

CACHE_FILE = "metadata_cache.json"


def written_ns(cache_file: str) -> int:
    """When a `metadata_cache.json` was written, ns; 0 where there is none."""
    try:
        return os.stat(cache_file).st_mtime_ns
    except OSError:
        return 0


def are_stated_truly(images: Sequence[str], written: Sequence[int]) -> list[bool]:
    """[N] whether the size of each image, noted at a time (ns), is to be believed.

    Not for WebP files, which imagesize 1.x reads one pixel short, nor for images that were edited since: they would be
    squeezed into the old shape. Of an image that is gone there is nothing better.
    """
    job = Job(STAT, images)
    job.run()
    times = job.rows["mtime_ns"].tolist()  # 0 of an image that is gone
    return [
        time <= noted and not image.lower().endswith(".webp")
        for image, time, noted in zip(images, times, written, strict=True)
    ]
