"""`read_config`: a dataset config, a trainer's settings, or folders, as resolved datasets with their images."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kohya_bucket.checks import path_meant, quoted
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import argument
from kohya_bucket.images import list_images
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.config_source import ConfigSource, load_source, no_datasets, real_path
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.sdscripts.config.caches import check_caches
from kohya_bucket.trainers.sdscripts.config.check import check_values, read_datasets
from kohya_bucket.trainers.sdscripts.config.dreambooth import list_controlnet, list_dreambooth
from kohya_bucket.trainers.sdscripts.config.finetuning import list_finetuning
from kohya_bucket.trainers.sdscripts.config.keys import DatasetConfig, DatasetKind
from kohya_bucket.trainers.sdscripts.config.model import ReadContext
from kohya_bucket.trainers.sdscripts.config.releases import KNOWN, NEWEST, Release
from kohya_bucket.trainers.sdscripts.config.run_file import FOLDERS, RunLength, run_file, without_settings
from kohya_bucket.trainers.sdscripts.dataset_images import DatasetTable, read_folder
from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER, trainer_named


@dataclass(frozen=True)
class ReadDataset:
    """One dataset with its images; `validation` is None where nothing is held back."""

    config: DatasetConfig
    images: DatasetTable
    validation: DatasetTable | None = None


@dataclass(frozen=True)
class Config:
    """Everything a dataset config says.

    Attributes:
        datasets: in order; those that sd-scripts could not build too, as far as they could be read.
        options: its `[kohya_bucket]` table over the environment's; None where a finding says what is wrong.
        findings: everything wrong or notable.
        programs: what it was checked for; a trainer's settings may name its family.
        release: the version of sd-scripts whose rules it was read by.
        length: how long a trainer's settings let it train; None for a dataset config, which does not say.
    """

    path: Path | None
    datasets: tuple[ReadDataset, ...]
    options: AdapterOptions | None
    findings: Findings
    programs: Programs = ANY_TRAINER
    length: RunLength | None = None
    release: Release = NEWEST


def read_config(
    path: str | os.PathLike[str],
    command_line: Mapping[str, Any] | None = None,
    *,
    release: Release = NEWEST,
    programs: Programs = ANY_TRAINER,
    check_captions: bool = True,
) -> Config:
    """Read a dataset config and list its images. No image is opened, and nothing is written.

    Args:
        path: a dataset config (`.toml` or `.json`), a trainer's settings as `--config_file` reads them (`.toml`), or a
            preset of the kohya_ss GUI (`.json`). Paths in it are relative to the current folder, as in sd-scripts.
        command_line: options of the trainer. They count where a dataset config is silent, and before a
            trainer's settings; `train_data_dir`, `reg_data_dir` and `in_json` are for a preset that names no images.
        release: the version of sd-scripts to follow.
        programs: which of them it is for, as far as that is known; a trainer's settings may show the family.
        check_captions: open every caption file, as sd-scripts does.

    Raises:
        ConfigError: the file cannot be read at all. Everything else is in `findings`.
    """
    source, findings, arguments = load_source(path, "sd-scripts"), Findings(), dict(command_line or {})
    folders = {name: arguments.pop(name, None) for name in FOLDERS}
    source = without_settings(source, findings)
    run = run_file(source, findings)
    if run is None:
        named = [f"--{name.replace('_', '-')}" for name, value in folders.items() if value is not None]
        if named and "datasets" in source.data:
            raise ConfigError(f"{source.path} {_beside_folders(source, ' and '.join(named))}")
        return _read(source, arguments, findings, release, programs, check_captions)
    paths, length = run.paths, run.length
    programs = programs if programs.title or not run.family else trainer_named(run.family).as_in(programs.steps)
    arguments = {**run.options, **{name: value for name, value in arguments.items() if value is not None}}
    dataset_config = paths["dataset_config"] if folders["train_data_dir"] is None else None
    data_dir, reg_data_dir, in_json = (folders[name] or paths[name] for name in FOLDERS)
    if dataset_config is not None:
        source = load_source(dataset_config, "sd-scripts")
        if data_dir is not None:
            ignored, used = quoted(data_dir), quoted(dataset_config)
            message = f"train_data_dir {ignored} is ignored, because dataset_config is {used}"
            findings.note("overruled", "", message, "the dataset config says which images there are, as in sd-scripts")
    elif data_dir is not None:
        source = _source_from_folders(data_dir, None if in_json else reg_data_dir, findings, in_json)
    else:
        raise ConfigError(
            f"{source.path} names neither a dataset_config nor a train_data_dir: choose the images and save it again, "
            f"or `kohya-bucket plan {argument(source.path)} --train-data-dir FOLDER`"
        )
    read = _read(source, arguments, findings, release, programs, check_captions)
    if length.computed and dataset_config is None:
        length = replace(length, max_train_steps=_steps_of_gui(read, length, bool(paths["reg_data_dir"])))
    return replace(read, length=length)


def _steps_of_gui(read: Config, length: RunLength, regularized: bool) -> int:
    """`max_train_steps` as the kohya_ss GUI computes it, which counts each image twice beside regularization images."""
    times = sum(int(one.images.repeats[~one.images.is_reg].sum()) for one in read.datasets)
    times *= 2 if regularized else 1
    return math.ceil(times / max(1, read.datasets[0].config.batch_size) / length.batches * length.epochs)


def _beside_folders(source: ConfigSource, options: str) -> str:
    """What is wrong with a dataset config together with folders on the command line."""
    listed = source.data["datasets"]
    if any(isinstance(one, dict) and one.get("subsets") for one in (listed if isinstance(listed, list) else [listed])):
        return f"brings its own images: leave out {options}"
    return (
        f"has no [[datasets.subsets]], so it names no images, and beside a dataset config {options} is ignored: write "
        "[[datasets.subsets]] with an image_dir below [[datasets]], or leave it out and give its keys as options"
    )


def read_folders(
    train_data_dir: str,
    reg_data_dir: str | None = None,
    command_line: Mapping[str, Any] | None = None,
    *,
    in_json: str | None = None,
    release: Release = NEWEST,
    programs: Programs = ANY_TRAINER,
) -> Config:
    """As `read_config`, for `--train_data_dir` with its `5_name` folders, `--reg_data_dir`, or `--in_json`."""
    findings = Findings()
    source = _source_from_folders(train_data_dir, reg_data_dir, findings, in_json)
    return _read(source, command_line, findings, release, programs)


def read_images(
    folder: str, command_line: Mapping[str, Any], *, release: Release = NEWEST, programs: Programs = ANY_TRAINER
) -> Config:
    """As `read_config`, for a folder without a config: one with `5_name` folders, or of images.

    Of images, each subfolder is a subset too, and captions are `.txt` files unless `command_line` says otherwise.
    """
    if any(re.match(r"[1-9]\d*_", entry.name) for entry in Path(folder).iterdir() if entry.is_dir()):
        return read_folders(folder, None, command_line, release=release, programs=programs)
    folders = sorted({os.path.dirname(image) for image in list_images([folder])})
    if not folders:
        raise ConfigError(f"{quoted(folder)} holds no images, neither do its subfolders: {path_meant(folder)}")
    ending = command_line.get("caption_extension") or ".txt"
    subsets = [{"image_dir": one, "caption_extension": ending} for one in folders]
    return _read(ConfigSource(None, {"datasets": [{"subsets": subsets}]}), command_line, Findings(), release, programs)


def _read(
    source: ConfigSource, command_line: Mapping[str, Any] | None, findings: Findings, release: Release,
    programs: Programs, check_captions: bool = True,
) -> Config:  # fmt: skip
    _check_release(release, findings)
    datasets = read_datasets(source, findings, command_line, release)
    if not source.data.get("datasets"):
        raise no_datasets(source.path, findings)
    base = source.path.resolve().parent if source.path else None
    options = AdapterOptions.of_config(source, findings)
    subsets = [subset for dataset in datasets for subset in dataset.subsets]
    folders = {folder for subset in subsets for folder in (subset.image_dir, subset.conditioning_data_dir) if folder}
    named = frozenset(map(real_path, folders))
    reading = ReadContext(findings, release, base, check_captions, (options or AdapterOptions()).metadata_cache, named)
    read: list[tuple[DatasetConfig, DatasetTable]] = []
    for dataset in datasets:
        images = _list(dataset, reading)
        check_values(dataset, findings, programs)
        check_caches(dataset, findings, programs)
        read.append((dataset, images))
    # Findings about folders belong to the training pass; a second pass would repeat them.
    quietly = replace(reading, findings=Findings())
    out = []
    for dataset, images in read:
        validation = None
        if 0 < dataset.validation_split <= 1:
            validation = _list(dataset, quietly, training=False)
            if dataset.kind is DatasetKind.DREAMBOOTH and not len(validation):
                message = f"validation_split {dataset.validation_split:g} holds back no image of this dataset"
                findings.warning("empty-validation", dataset.place, message, "raise it")
        out.append(ReadDataset(dataset, images, validation))
        if dataset.subsets and not len(images):
            findings.error("no-images", dataset.place, "no image is left to train", "see the other findings")
    return Config(source.path, tuple(out), options, findings, programs, release=release)


def _check_release(release: Release, findings: Findings) -> None:
    if release.is_known:
        return
    message = f"kohya_bucket knows sd-scripts {KNOWN}, not {release.name}: it may refuse more than is named here"
    remedy = "give its checkout, whose keys are read from its source: --sd-scripts DIR"
    if not release.version:
        message = f"the keys of {release.name} cannot be read from its source: it may refuse more than is named here"
        remedy = "see what it says when it starts"
    findings.warning("unknown-version", "", message, remedy)


def _list(dataset: DatasetConfig, reading: ReadContext, training: bool = True) -> DatasetTable:
    if dataset.kind is DatasetKind.DREAMBOOTH:
        return list_dreambooth(dataset, reading, training).as_table()
    return (list_finetuning if dataset.kind is DatasetKind.FINE_TUNING else list_controlnet)(
        dataset, reading
    ).as_table()


# The config that `--train_data_dir` and `--reg_data_dir` stand for: one subset for each `5_name` folder.
#
# Source: `generate_dreambooth_subsets_config_by_subdirs` in sd-scripts' library/config_util.py, and the trainers'
# handling of `--in_json`.


def _source_from_folders(
    train_data_dir: str, reg_data_dir: str | None, findings: Findings, in_json: str | None = None
) -> ConfigSource:
    """The subsets of both folders, in the order in which the system lists them, as sd-scripts takes them.

    Raises:
        ConfigError: train_data_dir is not a folder.
    """
    if in_json is not None:
        if reg_data_dir is not None:
            ignored = quoted(reg_data_dir)
            message = f"--reg_data_dir {ignored} is ignored with --in_json: fine-tuning has no regularization"
            findings.warning("no-regularization", "", message, "leave one of the two out", (reg_data_dir,))
        subset: dict[str, Any] = {"image_dir": train_data_dir, "metadata_file": in_json}
        return ConfigSource(None, {"datasets": [{"subsets": [subset]}]})
    if not os.path.isdir(train_data_dir):
        raise ConfigError(f"--train_data_dir {quoted(train_data_dir)} is not a folder: {path_meant(train_data_dir)}")
    subsets = _subsets(train_data_dir, False, findings)
    if reg_data_dir is not None and os.path.isdir(reg_data_dir):
        subsets += _subsets(reg_data_dir, True, findings)
    elif reg_data_dir is not None:
        message = f"--reg_data_dir {quoted(reg_data_dir)} is not a folder"
        findings.error("missing-folder", "", message, path_meant(reg_data_dir), (reg_data_dir,))
    return ConfigSource(None, {"datasets": [{"subsets": subsets}]})


def _subsets(folder: str, is_reg: bool, findings: Findings) -> list[dict[str, Any]]:
    option = "--reg_data_dir" if is_reg else "--train_data_dir"
    out: list[dict[str, Any]] = []
    passed_over = []
    for subfolder in filter(Path.is_dir, Path(folder).iterdir()):
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
    loose = read_folder(folder).images
    if not out:
        message = f"{option} {quoted(folder)} holds no subfolder named like '10_name' (repeats, underscore, tokens)"
        remedy = "put the images into subfolders such as '10_name'"
        if loose and re.match(r"\d+_", os.path.basename(os.path.normpath(folder))):
            remedy = f"give the folder above it, {os.path.dirname(os.path.abspath(folder))!r}"
        findings.error("no-repeat-folders", "", message, remedy, (folder,))
        return out
    if passed_over:
        message = f"{option}: sd-scripts skips folders without repeats in their names ({some(sorted(passed_over))})"
        findings.warning("no-repeat-folders", "", message, "rename them like '10_name'", sorted(passed_over))
    if loose:
        message = f"{option}: {counted(len(loose), 'image', 'is', 'are')} in {quoted(folder)} itself and not read"
        message += f" ({some(loose)})"
        findings.warning("loose-images", "", message, "move them into a '10_name' subfolder", loose)
    return out
