"""The config that `--train_data_dir` and `--reg_data_dir` stand for: one subset for each `5_name` folder.

Source: `generate_dreambooth_subsets_config_by_subdirs` in sd-scripts' library/config_util.py, and the trainers'
handling of `--in_json`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.config_source import Source
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.errors import ConfigError
from kohya_bucket.sdscripts.config.folders import read_folder
from kohya_bucket.texts import counted, some

__all__ = ["source_from_folders"]


def source_from_folders(
    train_data_dir: str, reg_data_dir: str | None, findings: Findings, in_json: str | None = None
) -> Source:
    """The subsets of both folders, in the order in which the system lists them, as sd-scripts takes them.

    Raises:
        ConfigError: train_data_dir is not a folder.
    """
    if in_json is not None:
        if reg_data_dir is not None:
            message = f"--reg_data_dir {reg_data_dir!r} is ignored with --in_json: fine-tuning has no regularization"
            findings.warning("no-regularization", "", message, "leave one of the two out", (reg_data_dir,))
        subset: dict[str, Any] = {"image_dir": train_data_dir, "metadata_file": in_json}
        return Source(None, {"datasets": [{"subsets": [subset]}]})
    if not os.path.isdir(train_data_dir):
        raise ConfigError(f"--train_data_dir {train_data_dir!r} is not a folder: correct the path")
    subsets = _subsets(train_data_dir, False, findings)
    if reg_data_dir is not None:
        if os.path.isdir(reg_data_dir):
            subsets += _subsets(reg_data_dir, True, findings)
        else:
            message = f"--reg_data_dir {reg_data_dir!r} is not a folder"
            findings.error("missing-folder", "", message, "correct the path", (reg_data_dir,))
    return Source(None, {"datasets": [{"subsets": subsets}]})


def _subsets(folder: str, is_reg: bool, findings: Findings) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    passed_over = []
    for subfolder in Path(folder).iterdir():
        if not subfolder.is_dir():
            continue
        first, *rest = subfolder.name.split("_")
        try:
            repeats = int(first)
        except ValueError:
            repeats = 0
        if repeats < 1:
            passed_over.append(subfolder.name)
            continue
        out.append(
            {"image_dir": str(subfolder), "num_repeats": repeats, "is_reg": is_reg, "class_tokens": "_".join(rest)}
        )
    _report(folder, is_reg, out, sorted(passed_over), findings)
    return out


def _report(folder: str, is_reg: bool, used: list[dict[str, Any]], passed_over: list[str], findings: Findings) -> None:
    option = "--reg_data_dir" if is_reg else "--train_data_dir"
    loose = read_folder(folder).images
    if not used:
        name = os.path.basename(os.path.normpath(folder))
        if loose and re.match(r"\d+_", name):
            remedy = f"give the folder above it, {os.path.dirname(os.path.abspath(folder))!r}"
        elif loose:
            remedy = f"move the images into a subfolder such as {os.path.join(folder, '10_name')!r}"
        elif passed_over:
            remedy = f"rename {passed_over[0]!r} to '10_{passed_over[0]}' for 10 repeats"
        else:
            remedy = "put the images into subfolders such as '10_name'"
        message = f"{option} {folder!r} holds no subfolder named like '10_name' (repeats, underscore, class tokens)"
        findings.error("no-repeat-folders", "", message, remedy, (folder,))
        return
    if passed_over:
        message = f"{option}: sd-scripts skips folders without repeats in their names ({some(passed_over)})"
        findings.warning("no-repeat-folders", "", message, "rename them like '10_name'", passed_over)
    if loose:
        message = (
            f"{option}: {counted(len(loose), 'image', 'is', 'are')} in {folder!r} itself and not read ({some(loose)})"
        )
        findings.warning("loose-images", "", message, "move them into a '10_name' subfolder", loose)
