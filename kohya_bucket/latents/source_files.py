"""Length, time and content of the image files that latents are made from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kohya_bucket.images.files.content_hash import hash_file
from kohya_bucket.images.scan.pool import Job

__all__ = ["hash_files", "stat_files"]


def hash_files(paths: Sequence[str]) -> list[str]:
    """Hash of each file's content; "" where it cannot be read."""
    out = []
    for path in paths:
        try:
            out.append(hash_file(path))
        except OSError:
            out.append("")
    return out


def stat_files(paths: Sequence[str]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Length in bytes and modification time in ns of each file, [N] each; -1 where it cannot be had."""
    job = Job("stat", paths)
    job.run()
    nbytes, mtimes = job.rows["bytes"].astype(np.int64), job.rows["mtime_ns"].astype(np.int64)
    failed = [index for index, _ in job.failures]
    nbytes[failed] = mtimes[failed] = -1
    return nbytes, mtimes
