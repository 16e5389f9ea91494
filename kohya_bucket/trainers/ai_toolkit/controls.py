"""Control images of ai-toolkit's items, which are stacked where a batch is made of them: all must have as many, alike.

Source: ostris/ai-toolkit, `ControlFileItemDTOMixin` and `DataLoaderBatchDTO`, and the models in `extensions_built_in`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from kohya_bucket.trainers.ai_toolkit.companions import Companions, companions_of
from kohya_bucket.trainers.door.sizes import scan_sizes

_ITEM_BY_ITEM = {"boogu_image_edit", "krea2", "mageflow_edit"}  # several of one item at a time, of whatever sizes
RAW = _ITEM_BY_ITEM | {"flux2", "flux2_klein_4b", "flux2_klein_9b", "minimax_h3_ref2va", "qwen_image_edit_plus"}
"""Models that take control images in the sizes of their files: `use_raw_control_images`; krea2 where it edits."""

_SMALL = (512, 512)

Layout = tuple[tuple[int, ...], ...]
"""What is alike in a batch: (width, height) of each control image; () for one of the size of the item's bucket, and
(number,) for so many of any size."""


def control_layouts(controls: Sequence[Sequence[str]], arch: str, *, raw: bool, full_size: bool) -> list[Layout]:
    """The layout of each item, of the files of its control images; those of an unreadable file are sizes of 0.

    Args:
        full_size: they are loaded in the size of the bucket, not at 512x512; raw: then in the sizes of their files.
    """
    if not (raw and full_size):
        return [(() if full_size else _SMALL,) * len(paths) for paths in controls]
    # The files whose sizes count; of several that are taken one by one, only their number does.
    compared = [paths if len(paths) == 1 or arch not in _ITEM_BY_ITEM else () for paths in controls]
    files = list(dict.fromkeys(path for paths in compared for path in paths))
    scan = scan_sizes(files)
    sizes = scan.sizes.tolist()
    turned = {
        path: (height, width) if orientation > 4 else (width, height)
        for path, (width, height), orientation in zip(files, sizes, scan.orientation.tolist(), strict=True)
    }
    return [
        tuple(turned[path] for path in own) if own or not paths else ((len(paths),),)
        for own, paths in zip(compared, controls, strict=True)
    ]


def controls_beside(images: Sequence[str], companions: Companions) -> list[list[str]]:
    """The control images of each image, one of each folder that has one."""
    folders = [folder for key, folder in companions if key == "control_path" and os.path.isdir(folder)]
    found = [companions_of(images, folder, "control_path") for folder in folders]
    return [[own[i] for own in found if own[i]] for i in range(len(images))]
