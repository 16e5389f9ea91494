"""Images that sd-scripts alone would put into another bucket, because it reads their size wrong.

imagesize 1.x, which sd-scripts pins, reads every extended WebP (with alpha, EXIF or ICC) one pixel short in both
sides. With `bucket_no_upscale` a 1024x1024 WebP then lands in 960x960.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kohya_bucket.buckets import Placement
from kohya_bucket.buckets.sizes import IntArray

__all__ = ["misread_buckets"]

_HEADER_BYTES = 16


def misread_buckets(
    paths: Sequence[str], sizes: IntArray, placement: Placement, place: Callable[[Any], Placement]
) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """(path, bucket there, bucket here) of the images whose bucket differs from what sd-scripts alone would use.

    Args:
        paths: [N] image files.
        sizes: [N, 2] their true sizes.
        placement: where they are placed.
        place: places sizes by the same rule.
    """
    webp = np.array([path.lower().endswith(".webp") for path in paths], dtype=bool) & placement.placed
    if not webp.any() or not _reads_webp_short():
        return []
    at = np.flatnonzero(webp)
    theirs = place(sizes[at] - 1)
    different = (theirs.bucket_sizes != placement.bucket_sizes[at]).any(axis=1)
    found = []
    for k in np.flatnonzero(different).tolist():
        i = int(at[k])
        if _is_extended_webp(Path(paths[i])):
            there, here = (tuple(map(int, b)) for b in (theirs.bucket_sizes[k], placement.bucket_sizes[i]))
            found.append((paths[i], (there[0], there[1]), (here[0], here[1])))
    return found


def _reads_webp_short() -> bool:
    try:
        return importlib.metadata.version("imagesize").startswith("1.")
    except importlib.metadata.PackageNotFoundError:
        return False


def _is_extended_webp(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except OSError:
        return False
    return head[:4] == b"RIFF" and head[8:16] == b"WEBPVP8X"
