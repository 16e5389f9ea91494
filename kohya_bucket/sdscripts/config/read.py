"""`read_config`: a dataset config, a trainer's settings, or folders, as resolved datasets with their images."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kohya_bucket.adapter.config_source import Source, load_source
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.architectures import ANY_TRAINER, Trainer, trainer_named
from kohya_bucket.sdscripts.config import arguments as command_line
from kohya_bucket.sdscripts.config.by_folders import source_from_folders
from kohya_bucket.sdscripts.config.check import check_config
from kohya_bucket.sdscripts.config.controlnet import list_controlnet
from kohya_bucket.sdscripts.config.dreambooth import as_list as list_dreambooth
from kohya_bucket.sdscripts.config.finetuning import list_finetuning
from kohya_bucket.sdscripts.config.model import DatasetConfig, ImageList
from kohya_bucket.sdscripts.config.reading import Reading
from kohya_bucket.sdscripts.config.release import NEWEST, Change, Release
from kohya_bucket.sdscripts.config.resolve import resolve
from kohya_bucket.sdscripts.config.run_file import run_file
from kohya_bucket.sdscripts.config.schema import ALL, Kind, Supports
from kohya_bucket.sdscripts.config.validity import check_shared_images, check_split, check_values, note_overruled

__all__ = ["Config", "ReadDataset", "read_config", "read_folders"]

_FOLDERS = ("train_data_dir", "reg_data_dir", "in_json")


@dataclass(frozen=True)
class ReadDataset:
    """One dataset with its images; `validation` is None where nothing is held back."""

    config: DatasetConfig
    images: ImageList
    validation: ImageList | None = None


@dataclass(frozen=True)
class Config:
    """All that a dataset config says.

    Attributes:
        path: the config file, or None.
        datasets: its datasets, in order. Those that sd-scripts could not build are there with what is known.
        table: the `[kohya_bucket]` table, or None.
        findings: everything that is wrong or notable.
        family: the model family, where the file shows it; see `ARCHITECTURES`.
        trainer: what it was checked for.
    """

    path: Path | None
    datasets: tuple[ReadDataset, ...]
    table: Mapping[str, Any] | None
    findings: Findings
    family: str = ""
    trainer: Trainer = ANY_TRAINER


def read_config(
    path: str | os.PathLike[str],
    given: Mapping[str, Any] | None = None,
    *,
    supports: Supports = ALL,
    release: Release = NEWEST,
    trainer: Trainer = ANY_TRAINER,
    check_captions: bool = True,
) -> Config:
    """Read a dataset config and list its images. No image is opened, and nothing is written.

    Args:
        path: a dataset config (`.toml` or `.json`), a trainer's settings as `--config_file` reads them (`.toml`), or a
            preset of the kohya_ss GUI (`.json`). Paths in it are relative to the current folder, as in sd-scripts.
        given: command line options of the trainer. They count where a dataset config is silent, and before a
            trainer's settings; `train_data_dir`, `reg_data_dir` and `in_json` are for a preset that names no images.
        supports: what the trainer reads; by default everything.
        release: the version of sd-scripts to follow.
        trainer: which trainer it is for, as far as that is known; a trainer's settings may show the family.
        check_captions: open every caption file, as sd-scripts does.

    Raises:
        ConfigError: the file cannot be read at all. Everything else is in `findings`.
    """
    source, findings, given = load_source(path), Findings(), dict(given or {})
    folders = {name: given.pop(name, None) for name in _FOLDERS}
    run = run_file(source, findings)
    if run is None:
        named = [f"--{name.replace('_', '-')}" for name, value in folders.items() if value is not None]
        if named and "datasets" in source.data:
            raise ConfigError(f"{source.path} brings its own images: leave out {' and '.join(named)}")
        return _read(source, given, findings, supports, release, trainer, check_captions)
    trainer = trainer if trainer.title or not run.family else trainer_named(run.family).as_in(trainer.steps)
    given = {**run.given, **{name: value for name, value in given.items() if value is not None}}
    data_dir = folders["train_data_dir"] or run.train_data_dir
    if run.dataset_config is not None and folders["train_data_dir"] is None:
        source = load_source(run.dataset_config)
        if data_dir is not None:
            message = f"train_data_dir {data_dir!r} is ignored, because dataset_config is {run.dataset_config!r}"
            findings.note("overruled", "", message, "the dataset config says which images there are, as in sd-scripts")
    elif data_dir is not None:
        reg_data_dir, in_json = folders["reg_data_dir"] or run.reg_data_dir, folders["in_json"] or run.in_json
        source = source_from_folders(data_dir, None if in_json else reg_data_dir, findings, in_json)
    else:
        raise ConfigError(
            f"{source.path} names neither a dataset_config nor a train_data_dir: choose the images and save it again, "
            f"or `kohya-bucket plan {source.path} --train-data-dir FOLDER`"
        )
    read = _read(source, given, findings, supports, release, trainer, check_captions)
    return replace(read, family=run.family)


def read_folders(
    train_data_dir: str,
    reg_data_dir: str | None = None,
    given: Mapping[str, Any] | None = None,
    *,
    in_json: str | None = None,
    release: Release = NEWEST,
    trainer: Trainer = ANY_TRAINER,
    check_captions: bool = True,
) -> Config:
    """As `read_config`, for `--train_data_dir` with its `5_name` folders, `--reg_data_dir`, or `--in_json`."""
    findings = Findings()
    source = source_from_folders(train_data_dir, reg_data_dir, findings, in_json)
    return _read(source, given, findings, ALL, release, trainer, check_captions)


def _read(
    source: Source, given: Mapping[str, Any] | None, findings: Findings, supports: Supports, release: Release,
    trainer: Trainer, check_captions: bool,
) -> Config:  # fmt: skip
    checked = check_config(source, findings, supports, release)
    options = command_line.arguments(given)
    named = {command_line.config_name(name) for name, value in (given or {}).items() if value is not None}
    note_overruled({name: options[name] for name in named if name in options}, checked, findings)
    datasets = resolve(checked, options)
    if not source.data.get("datasets"):
        raise ConfigError(f"{source.path}: there is no [[datasets]] in it, so there is nothing to train")
    base = source.path.resolve().parent if source.path else None
    kept = (checked.kohya_bucket or {}).get("metadata_cache")
    reading = Reading(findings, release, base, check_captions, kept if isinstance(kept, str) and kept else "auto")
    read: list[tuple[DatasetConfig, ImageList]] = []
    for dataset in datasets:
        images = _list(dataset, reading)
        if images.predefined is not None:
            dataset = _take_predefined(dataset, findings)
        check_values(dataset, findings, trainer, predefined=images.predefined is not None)
        read.append((dataset, images))
    check_shared_images(read, findings)
    out = []
    for dataset, images in read:
        validation = None
        if Change.VALIDATION in release and 0 < dataset.validation_split <= 1:
            validation = _list(dataset, reading, training=False)
            check_split(dataset, images, validation, findings)
        out.append(ReadDataset(dataset, images, validation))
        if dataset.subsets and not len(images):
            findings.error("no-images", dataset.place, "no image is left to train", "see the other findings")
    return Config(source.path, tuple(out), checked.kohya_bucket, findings, trainer=trainer)


def _list(dataset: DatasetConfig, reading: Reading, training: bool = True) -> ImageList:
    if not training and dataset.kind is not Kind.DREAMBOOTH:
        reading = replace(reading, findings=Findings(), check_captions=False)
    if dataset.kind is Kind.FINE_TUNING:
        return list_finetuning(dataset, reading)
    if dataset.kind is Kind.CONTROLNET:
        return list_controlnet(dataset, reading)
    return list_dreambooth(dataset, reading, training)


def _take_predefined(dataset: DatasetConfig, findings: Findings) -> DatasetConfig:
    """sd-scripts 0.9 with sizes in all of the metadata: these sizes are the buckets."""
    if dataset.bucket_no_upscale:
        message = "the metadata holds finished buckets, with which sd-scripts 0.9 refuses bucket_no_upscale"
        findings.error("predefined-buckets", dataset.place, message, "remove bucket_no_upscale")
    return replace(dataset, enable_bucket=True)
