"""Which sizes sd-scripts already knows and may be trusted with, and which are read from the files.

Sizes that sd-scripts took from the *names* of cached latents match by prefix there: `img_1.png` takes the
size of `img_10_0300x0200_sd.npz`. Sizes of WebP files in its `metadata_cache.json` may be one pixel short.
Both are read again from the image's header, which is faster than the doubt is worth.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import numpy as np

from kohya_bucket.buckets.types import IntArray
from kohya_bucket.images import read_sizes
from kohya_bucket.sdscripts.size_cache import scan_sizes

__all__ = ["true_size", "true_sizes"]

_CACHE_NAME = re.compile(r"(?P<stem>.*)_\d{4,}x\d{4,}(_[a-z0-9]+)?\.npz", re.IGNORECASE | re.DOTALL)


def true_size(path: str) -> tuple[int, int]:
    """(width, height) of one file; (0, 0) if it cannot be read."""
    width, height = read_sizes([path]).sizes[0]
    return int(width), int(height)


def true_sizes(dataset: Any, infos: Sequence[Any], metadata_cache: str = "auto") -> tuple[IntArray, dict[int, str]]:
    """Sizes of a dataset's images.

    Args:
        dataset: sd-scripts' dataset object, for its `image_to_subset`.
        infos: [N] its image infos.
        metadata_cache: the option of that name.

    Returns:
        [N, 2] int32 (width, height), (0, 0) where a file could not be read, and the reason for each of those.
    """
    sizes = np.zeros((len(infos), 2), dtype=np.int32)
    to_read = []
    for i, info in enumerate(infos):
        _undo_wrong_cache_match(info)
        if info.image_size is not None and _is_trusted(info, dataset.image_to_subset[info.image_key]):
            sizes[i] = info.image_size
        else:
            to_read.append(i)
    reasons: dict[int, str] = {}
    if to_read:
        scan = scan_sizes([infos[i].absolute_path for i in to_read], metadata_cache)
        if not scan.read.all():
            raise KeyboardInterrupt
        sizes[to_read] = scan.sizes
        reasons = {to_read[i]: reason for i, _, reason in scan.failures}
    return sizes, reasons


def _is_trusted(info: Any, subset: Any) -> bool:
    if hasattr(subset, "metadata_file"):
        return True
    return bool(getattr(subset, "cache_info", False)) and not info.absolute_path.lower().endswith(".webp")


def _undo_wrong_cache_match(info: Any) -> None:
    """Fine-tuning sets: a cache file whose name only begins like the image's is another image's."""
    path = info.absolute_path
    if path == info.image_key or not path.lower().endswith(".npz"):
        return
    match = _CACHE_NAME.fullmatch(PurePath(path).name)
    if match and match["stem"] != PurePath(info.image_key).stem:
        info.absolute_path, info.image_size = info.image_key, None
