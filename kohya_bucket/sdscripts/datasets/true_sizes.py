"""Which sizes sd-scripts already knows and may be trusted with, and which are read from the files.

Sizes that sd-scripts took from the *names* of cached latents match by prefix there: `img_1.png` takes the
size of `img_10_0300x0200_sd.npz`. Sizes of WebP files in its `metadata_cache.json` may be one pixel short, and
images may have been edited since. All these are read again from the image's header, which is faster than the
doubt is worth. In fine-tuning sets such a cache also takes the image's place; it is put back, since latents are
checked against the image that they were made from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import PurePath

import numpy as np

from kohya_bucket.adapter.kept_sizes import scan_sizes
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.sdscripts.config.folders import image_named, supported_extensions
from kohya_bucket.sdscripts.config.stated_sizes import CACHE_FILE, are_stated_truly, written_ns
from kohya_bucket.sdscripts.objects import Dataset, ImageRecord, Subset

__all__ = ["true_sizes"]

_CACHE_NAME = re.compile(r"(?P<stem>.*)_\d{4,}x\d{4,}(_[a-z0-9]+)?\.npz", re.IGNORECASE | re.DOTALL)


def true_sizes(
    dataset: Dataset, infos: Sequence[ImageRecord], metadata_cache: str = "auto"
) -> tuple[IntArray, dict[int, str]]:
    """Sizes of a dataset's images.

    Args:
        dataset: sd-scripts' dataset object, for its `image_to_subset`.
        infos: [N] its image infos.
        metadata_cache: the option of that name.

    Returns:
        [N, 2] int32 (width, height), (0, 0) where a file could not be read, and the reason for each of those.
    """
    sizes = np.zeros((len(infos), 2), dtype=np.int32)
    unknown, noted = [], []
    subsets = [dataset.image_to_subset[info.image_key] for info in infos]
    for i, (info, subset) in enumerate(zip(infos, subsets, strict=True)):
        _put_image_back(info, subset)
        stated = info.image_size
        if stated is not None and hasattr(subset, "metadata_file"):
            sizes[i] = stated
        elif stated is not None and getattr(subset, "cache_info", False):
            noted.append(i)
        else:
            unknown.append(i)
    written = {folder: written_ns(os.path.join(folder, CACHE_FILE)) for folder in {_folder(subsets[i]) for i in noted}}  # noqa: PTH118
    truly = are_stated_truly([infos[i].absolute_path for i in noted], [written[_folder(subsets[i])] for i in noted])
    for i, true in zip(noted, truly, strict=True):
        if true:
            sizes[i] = infos[i].image_size or (0, 0)
        else:
            unknown.append(i)
    to_read = sorted(unknown)
    reasons: dict[int, str] = {}
    if to_read:
        scan = scan_sizes([infos[i].absolute_path for i in to_read], metadata_cache)
        if not scan.read.all():
            raise KeyboardInterrupt
        sizes[to_read] = scan.sizes
        reasons = {to_read[i]: reason for i, _, reason in scan.failures}
    return sizes, reasons


def _folder(subset: Subset) -> str:
    return subset.image_dir or ""


def _put_image_back(info: ImageRecord, subset: Subset) -> None:
    """Fine-tuning sets: where metadata has no size, a cache with a name like the image's stands for the image.

    If its name only begins like the image's, it is another image's. If the image itself is gone, its own cache still
    knows the size.
    """
    path = info.absolute_path
    if path == info.image_key or not path.lower().endswith(".npz"):
        return
    match = _CACHE_NAME.fullmatch(PurePath(path).name)
    if match is None:
        return
    image = os.path.join(_folder(subset), info.image_key)  # noqa: PTH118
    # since 0.10.6 a key need not have an extension
    info.absolute_path = image if os.path.isfile(image) else image_named(image) or image  # noqa: PTH113
    if match["stem"] != _stem(info.image_key) or os.path.exists(info.absolute_path):  # noqa: PTH110
        info.image_size = None
        info.latents_npz = None  # since 0.11.1 that cache would be trained from without a look at it


def _stem(key: str) -> str:
    """How caches of an image begin, whose key has an extension or none."""
    path = PurePath(key)
    return path.stem if path.suffix in supported_extensions() else path.name
