"""Files that belong to each image of a dataset: control and inpaint images, masks, and what else a job names by folder.

Source: ostris/ai-toolkit, the mixins of `FileItemDTO` in `toolkit/dataloader_mixins.py`, and its `DatasetConfig`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kohya_bucket.checks import path_meant, quoted
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.findings import Findings

IMAGES = (".jpg", ".jpeg", ".png", ".webp")
"""Endings of images that ai-toolkit reads."""

_ENDINGS = {"inpaint_path": (".png", ".webp")}  # of other keys those of images
_OTHERWISE = {
    "control_path": "are trained without one",
    "inpaint_path": "are trained without one",
    "mask_path": "are trained without a mask",
    "clip_image_path": "are trained without one",
    "unconditional_path": "are trained without one",
}
_EDITING = frozenset(
    ["flux_kontext", "qwen_image_edit", "qwen_image_edit_plus", "hidream_e1", "boogu_image_edit", "mageflow_edit"]
)
"""Models that are trained to edit: most of them train without control images in silence, and the others stop."""

Companions = tuple[tuple[str, str], ...]
"""(key, folder) of each folder that a dataset names."""


def companions_in(table: Mapping[str, Any], name: str, findings: Findings) -> Companions:
    """The folders that a dataset names; what cannot be a path is added to the findings."""
    numbered = [table[key] for key in ("control_path_1", "control_path_2", "control_path_3") if table.get(key)]
    control = numbered or table.get("control_path") or []
    folders = [("control_path", one) for one in (control if isinstance(control, list) else [control])]
    folders += [(key, table[key]) for key in _OTHERWISE if key != "control_path" and table.get(key)]
    for key, folder in folders:
        if not isinstance(folder, str):
            findings.error("wrong-type", name, f"{key} is {folder!r}, but must be a text in quotes", names=(key,))
    masked = bool(table.get("alpha_mask"))  # then the images are their own masks
    return tuple((key, one) for key, one in folders if isinstance(one, str) and not (masked and key == "mask_path"))


def check_companions(companions: Companions, images: Sequence[str], place: str, findings: Findings) -> None:
    """Name the images that have no file of the same name in a folder that their dataset names."""
    for key, folder in companions:
        if not os.path.isdir(folder):
            message = f"{key} {quoted(folder)} is not a folder, so images {_OTHERWISE[key]}"
            findings.warning("missing-control", place, message, path_meant(folder), (folder,))
        elif bare := [image for image, own in zip(images, companions_of(images, folder, key), strict=True) if not own]:
            message = f"{len(bare):,} of {counted(len(images), 'image')} without a file of the same name in "
            message += f"{quoted(folder)} ({key}), which {_OTHERWISE[key]} ({some(bare, 2)})"
            endings = ", ".join(_ENDINGS.get(key, IMAGES))
            findings.warning("missing-control", place, message, f"add them, with one of the endings {endings}", bare)


def companions_of(images: Sequence[str], folder: str, key: str) -> list[str]:
    """The file of each image's name in a folder, the first by the order of endings; "" where there is none."""
    names, endings = set(map(os.path.normcase, os.listdir(folder))), _ENDINGS.get(key, IMAGES)
    wanted = ([Path(image).stem + ending for ending in endings] for image in images)
    first = (next((name for name in of_image if os.path.normcase(name) in names), "") for of_image in wanted)
    return [name and os.path.join(folder, name) for name in first]


def check_editing(table: Mapping[str, Any], companions: Companions, arch: str, name: str, findings: Findings) -> None:
    """Say so where a model that is trained to edit has no image to begin with."""
    made = table.get("controls") or table.get("control_from_same_folder")
    if arch in _EDITING and not made and not any(key == "control_path" for key, _ in companions):
        message = f"names no control_path, but {arch} is trained to edit control images: it learns without, or stops"
        findings.warning("missing-control", name, message, "set control_path to a folder with files of the same names")
