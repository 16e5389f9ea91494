"""The pairs of a ControlNet dataset. Source: sd-scripts' `ControlNetDataset.__init__`.

The images are listed as DreamBooth images; each needs a control image of the same name, whatever its extension.
Before 0.10.2 every control image had to belong to one.
"""

from __future__ import annotations

import os

from kohya_bucket.sdscripts.config.dreambooth import list_dreambooth
from kohya_bucket.sdscripts.config.folders import Folder, missing_folder, read_folder, supported_extensions
from kohya_bucket.sdscripts.config.model import DatasetConfig, ImageList, SubsetConfig
from kohya_bucket.sdscripts.config.reading import Reading
from kohya_bucket.sdscripts.config.release import Change
from kohya_bucket.texts import counted, some

__all__ = ["list_controlnet"]


def list_controlnet(dataset: DatasetConfig, reading: Reading) -> ImageList:
    """The images with their control images."""
    registry = list_dreambooth(dataset, reading)
    registry.report(dataset.subsets, reading.findings)
    by_folder: dict[str | None, SubsetConfig] = {}
    for subset in dataset.subsets:
        by_folder.setdefault(subset.image_dir, subset)
        if subset.random_crop:
            message = "random_crop is set, which sd-scripts refuses for ControlNet datasets"
            reading.findings.error("random-crop", subset.place, message, "remove it")
    folders = _control_folders(dataset, reading)
    extensions = sorted(supported_extensions())
    paired: set[str] = set()
    missing: dict[int, list[str]] = {}
    for entry in registry.entries.values():
        subset = by_folder[dataset.subsets[entry.subset - 1].image_dir]
        folder = folders.get(subset.conditioning_data_dir or "")
        if folder is None:
            continue
        name = os.path.splitext(os.path.basename(entry.path))[0]
        match = next((name + e for e in extensions if name + e in folder.names), None)
        if match is None:
            missing.setdefault(subset.number, []).append(name)
            continue
        entry.conditioning = os.path.abspath(os.path.join(folder.path, match))
        paired.add(os.path.splitext(entry.conditioning)[0])
    _report_missing(missing, dataset, reading)
    _report_extra(folders, paired, dataset, reading)
    return registry.as_list()


def _control_folders(dataset: DatasetConfig, reading: Reading) -> dict[str, Folder]:
    out: dict[str, Folder] = {}
    for subset in dataset.subsets:
        path = subset.conditioning_data_dir
        if path is None or path in out:
            continue
        if os.path.isdir(path):
            out[path] = read_folder(path)
        else:
            missing_folder("conditioning_data_dir", path, reading.findings, subset.place, reading.base)
    return out


def _report_missing(missing: dict[int, list[str]], dataset: DatasetConfig, reading: Reading) -> None:
    for number, names in missing.items():
        subset = dataset.subsets[number - 1]
        message = (
            f"{counted(len(names), 'image', 'has', 'have')} no control image of the same name in "
            f"{subset.conditioning_data_dir!r}, "
            f"and sd-scripts stops at that ({some(names)})"
        )
        reading.findings.error("missing-control-image", subset.place, message, "add them or remove the images", names)


def _report_extra(folders: dict[str, Folder], paired: set[str], dataset: DatasetConfig, reading: Reading) -> None:
    stops = Change.SKIPPING not in reading.release
    for path, folder in folders.items():
        extra = [p for p in folder.images if os.path.splitext(os.path.abspath(p))[0] not in paired]
        if not extra:
            continue
        message = (
            f"{counted(len(extra), 'control image')} in {path!r} {'has' if len(extra) == 1 else 'have'} no "
            "image that is trained"
        )
        remedy = "remove them, or add what they control"
        if stops:
            message += ", and sd-scripts stops at that"
            remedy = "remove them"
            if dataset.validation_split > 0:
                message += " (images held back for validation count as none)"
                remedy = "ControlNet datasets do not work with validation_split: remove it"
        add = reading.findings.error if stops else reading.findings.note
        add("extra-control-image", dataset.place, f"{message} ({some(extra)})", remedy, extra)
