"""`read_config`: a dataset config, a trainer's settings, or folders, as resolved datasets with their images."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from kohya_bucket.checks import path_meant
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import argument
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.config_source import ConfigSource, load_source
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.config.caches import check_caches
from kohya_bucket.trainers.sdscripts.config.check import check_values, read_datasets
from kohya_bucket.trainers.sdscripts.config.dreambooth import list_controlnet, list_dreambooth
from kohya_bucket.trainers.sdscripts.config.files import read_folder
from kohya_bucket.trainers.sdscripts.config.finetuning import list_finetuning
from kohya_bucket.trainers.sdscripts.config.keys import DEFAULTS, DatasetConfig, DatasetKind, config_name
from kohya_bucket.trainers.sdscripts.config.model import DatasetTable, ReadContext
from kohya_bucket.trainers.sdscripts.config.releases import KNOWN, NEWEST, Feature, Release
from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER, ARCHITECTURES, Trainer, trainer_named

_Number = TypeVar("_Number", int, float)
_FOLDERS = ("train_data_dir", "reg_data_dir", "in_json")


@dataclass(frozen=True)
class ReadDataset:
    """One dataset with its images; `validation` is None where nothing is held back."""

    config: DatasetConfig
    images: DatasetTable
    validation: DatasetTable | None = None


@dataclass(frozen=True)
class Config:
    """All that a dataset config says.

    Attributes:
        datasets: its datasets, in order. Those that sd-scripts could not build are there with what is known.
        options: those of its `[kohya_bucket]` table, over the environment's; None where a finding says what is wrong.
        findings: everything that is wrong or notable.
        family: the model family, where the file shows it; see `ARCHITECTURES`.
        trainer: what it was checked for.
        release: the version of sd-scripts that it was read as.
        length: how long a trainer's settings let it train; None for a dataset config, which does not say.
    """

    path: Path | None
    datasets: tuple[ReadDataset, ...]
    options: AdapterOptions | None
    findings: Findings
    family: str = ""
    trainer: Trainer = ANY_TRAINER
    length: RunLength | None = None
    release: Release = NEWEST


def read_config(
    path: str | os.PathLike[str],
    given: Mapping[str, Any] | None = None,
    *,
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
        release: the version of sd-scripts to follow.
        trainer: which trainer it is for, as far as that is known; a trainer's settings may show the family.
        check_captions: open every caption file, as sd-scripts does.

    Raises:
        ConfigError: the file cannot be read at all. Everything else is in `findings`.
    """
    source, findings, given = load_source(path, "sd-scripts"), Findings(), dict(given or {})
    folders = {name: given.pop(name, None) for name in _FOLDERS}
    source = _without_settings(source, findings)
    run = _run_file(source, findings)
    if run is None:
        named = [f"--{name.replace('_', '-')}" for name, value in folders.items() if value is not None]
        if named and "datasets" in source.data:
            raise ConfigError(f"{source.path} {_beside_folders(source, ' and '.join(named))}")
        return _read(source, given, findings, release, trainer, check_captions)
    paths, options, family, length = run
    trainer = trainer if trainer.title or not family else trainer_named(family).as_in(trainer.steps)
    given = {**options, **{name: value for name, value in given.items() if value is not None}}
    dataset_config = paths["dataset_config"] if folders["train_data_dir"] is None else None
    data_dir, reg_data_dir, in_json = (folders[name] or paths[name] for name in _FOLDERS)
    if dataset_config is not None:
        source = load_source(dataset_config, "sd-scripts")
        if data_dir is not None:
            message = f"train_data_dir {data_dir!r} is ignored, because dataset_config is {dataset_config!r}"
            findings.note("overruled", "", message, "the dataset config says which images there are, as in sd-scripts")
    elif data_dir is not None:
        source = _source_from_folders(data_dir, None if in_json else reg_data_dir, findings, in_json)
    else:
        raise ConfigError(
            f"{source.path} names neither a dataset_config nor a train_data_dir: choose the images and save it again, "
            f"or `kohya-bucket plan {argument(source.path)} --train-data-dir FOLDER`"
        )
    read = _read(source, given, findings, release, trainer, check_captions, family)
    if length.computed and dataset_config is None:
        times = sum(int(one.images.repeats[~one.images.is_reg].sum()) for one in read.datasets)
        times *= 2 if paths["reg_data_dir"] else 1
        steps = times / max(1, read.datasets[0].config.batch_size) / length.batches * length.epochs
        length = replace(length, max_train_steps=math.ceil(steps))
    return replace(read, length=length)


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
    given: Mapping[str, Any] | None = None,
    *,
    in_json: str | None = None,
    release: Release = NEWEST,
    trainer: Trainer = ANY_TRAINER,
    check_captions: bool = True,
) -> Config:
    """As `read_config`, for `--train_data_dir` with its `5_name` folders, `--reg_data_dir`, or `--in_json`."""
    findings = Findings()
    source = _source_from_folders(train_data_dir, reg_data_dir, findings, in_json)
    return _read(source, given, findings, release, trainer, check_captions)


def _read(
    source: ConfigSource, given: Mapping[str, Any] | None, findings: Findings, release: Release, trainer: Trainer,
    check_captions: bool, family: str = "",
) -> Config:  # fmt: skip
    _check_release(release, findings)
    datasets = read_datasets(source, findings, given, release)
    if not source.data.get("datasets"):
        raise ConfigError(f"{source.path}: there is no [[datasets]] in it, so there is nothing to train")
    base = source.path.resolve().parent if source.path else None
    options = AdapterOptions.of_config(source, findings)
    reading = ReadContext(findings, release, base, check_captions, (options or AdapterOptions()).metadata_cache)
    read: list[tuple[DatasetConfig, DatasetTable]] = []
    for dataset in datasets:
        images = _list(dataset, reading)
        if images.predefined is not None:  # sd-scripts 0.9 with sizes in all of the metadata: these are the buckets
            if dataset.bucket_no_upscale:
                message = "the metadata holds finished buckets, with which sd-scripts 0.9 refuses bucket_no_upscale"
                findings.error("predefined-buckets", dataset.place, message, "remove bucket_no_upscale")
            dataset = replace(dataset, enable_bucket=True)
        check_values(dataset, findings, trainer, predefined=images.predefined is not None)
        check_caches(dataset, findings, trainer)
        read.append((dataset, images))
    # Findings about folders belong to the training pass; a second pass would repeat them.
    quietly = replace(reading, findings=Findings())
    out = []
    for dataset, images in read:
        validation = None
        if Feature.VALIDATION in release and 0 < dataset.validation_split <= 1:
            validation = _list(dataset, quietly, training=False)
            if dataset.kind is DatasetKind.DREAMBOOTH and not len(validation):
                message = f"validation_split {dataset.validation_split:g} holds back no image of this dataset"
                findings.warning("empty-validation", dataset.place, message, "raise it")
        out.append(ReadDataset(dataset, images, validation))
        if dataset.subsets and not len(images):
            findings.error("no-images", dataset.place, "no image is left to train", "see the other findings")
    return Config(source.path, tuple(out), options, findings, family, trainer, release=release)


def _check_release(release: Release, findings: Findings) -> None:
    if release.is_known:
        return
    message = (
        f"sd-scripts {release.name} is not among the versions that are known here, {KNOWN}: not all that it refuses "
    )
    remedy = "give its checkout, whose keys are read from its source: --sd-scripts DIR"
    if not release.version:
        message = f"the keys that {release.name} takes cannot be read from its source: not all that it refuses "
        remedy = "see what it says when it starts"
    findings.warning("unknown-version", "", message + "may be named", remedy)


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
            message = f"--reg_data_dir {reg_data_dir!r} is ignored with --in_json: fine-tuning has no regularization"
            findings.warning("no-regularization", "", message, "leave one of the two out", (reg_data_dir,))
        subset: dict[str, Any] = {"image_dir": train_data_dir, "metadata_file": in_json}
        return ConfigSource(None, {"datasets": [{"subsets": [subset]}]})
    if not os.path.isdir(train_data_dir):
        raise ConfigError(f"--train_data_dir {train_data_dir!r} is not a folder: {path_meant(train_data_dir)}")
    subsets = _subsets(train_data_dir, False, findings)
    if reg_data_dir is not None and os.path.isdir(reg_data_dir):
        subsets += _subsets(reg_data_dir, True, findings)
    elif reg_data_dir is not None:
        message = f"--reg_data_dir {reg_data_dir!r} is not a folder"
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
        message = f"{option} {folder!r} holds no subfolder named like '10_name' (repeats, underscore, class tokens)"
        remedy = "put the images into subfolders such as '10_name'"
        if loose and re.match(r"\d+_", os.path.basename(os.path.normpath(folder))):
            remedy = f"give the folder above it, {os.path.dirname(os.path.abspath(folder))!r}"
        findings.error("no-repeat-folders", "", message, remedy, (folder,))
        return out
    if passed_over:
        message = f"{option}: sd-scripts skips folders without repeats in their names ({some(sorted(passed_over))})"
        findings.warning("no-repeat-folders", "", message, "rename them like '10_name'", sorted(passed_over))
    if loose:
        message = f"{option}: {counted(len(loose), 'image', 'is', 'are')} in {folder!r} itself and not read"
        message += f" ({some(loose)})"
        findings.warning("loose-images", "", message, "move them into a '10_name' subfolder", loose)
    return out


# A trainer's settings in one file: what `--config_file` reads, or a preset that a GUI keeps.
#
# Source: `read_config_from_file` in sd-scripts, and the settings that the kohya_ss GUI saves and hands over. The GUI
# has names of its own for some of them, writes numbers as text, and leaves out what is empty.


_TELLING = {
    "dataset_config", "train_data_dir", "pretrained_model_name_or_path", "max_resolution", "resolution",
    "train_batch_size", "network_module", "LoRA_type", "learning_rate", "output_dir",
}  # fmt: skip
_GUI_NAMES = {"max_resolution": "resolution", "image_folder": "train_data_dir"}
_NO_OPTIONS = {"batch_size", "num_repeats"}  # are called otherwise on the command line; the GUI's are for other things
_FAMILY_OF_BOX = {
    "sdxl": "sdxl", "sdxl_checkbox": "sdxl", "flux1_checkbox": "flux", "sd3_checkbox": "sd3",
    "lumina_checkbox": "lumina", "hunyuan_image_checkbox": "hunyuan_image", "anima_checkbox": "anima",
}  # fmt: skip
_TEXT_CACHE_OF_BOX = {
    "sdxl": "sdxl", "sdxl_checkbox": "sdxl", "flux1_checkbox": "flux1", "sd3_checkbox": "sd3",
}  # fmt: skip
_FINE_TUNING = {"dataset_repeats", "create_buckets", "use_latent_files"}  # the GUI's fine-tuning has no other kind


_DEFAULT_STEPS = 1600


@dataclass(frozen=True)
class RunLength:
    """How long a trainer's settings let it train; a number that they do not give is 0.

    Attributes:
        epochs: those of the GUI, from which it computes steps; sd-scripts does not read them.
        max_train_epochs, max_train_steps: sd-scripts' options; the first one counts where both are given.
        batches: how many make one step, `gradient_accumulation_steps`.
        processes: how many the GUI starts; 1 where the file does not say.
        computed: the GUI computes `max_train_steps`, from images x repeats / batch size x epochs.
    """

    epochs: int = 0
    max_train_epochs: int = 0
    max_train_steps: int = 0
    batches: int = 1
    computed: bool = False
    processes: int = 1

    @classmethod
    def of(cls, source: ConfigSource, settings: Mapping[str, Any], preset: bool) -> RunLength:
        """Of the settings in a file, of which a preset may have numbers as text."""
        names = ("epoch", "max_train_epochs", "max_train_steps", "gradient_accumulation_steps", "num_processes")
        numbers = (_number(source, name, settings.get(name, 0) or 0, preset, 0) for name in names)
        epochs, most, steps, batches, processes = numbers
        computed = preset and bool(epochs) and not (most or steps)
        return cls(epochs, most, steps, max(batches, 1), computed, max(processes, 1) if preset else 1)

    def text(self, steps: int) -> str:
        """The whole training, for a reader, where an epoch has so many steps (updates of the weights)."""
        epochs = self.max_train_epochs or self.epochs or 1
        total = f"{epochs:,} epoch{'s' * (epochs != 1)} = {counted(epochs * steps, 'step')}"
        if self.max_train_epochs:
            over = self.max_train_steps and self.max_train_steps != epochs * steps
            return total + (f"; max_train_epochs counts, not max_train_steps {self.max_train_steps}" if over else "")
        limit = self.max_train_steps or _DEFAULT_STEPS
        by = ", as the GUI computes it," if self.computed else "" if self.max_train_steps else ", sd-scripts' default,"
        last = -(-limit // max(steps, 1))
        return f"{total}; max_train_steps {limit}{by} ends {'in' if limit % max(steps, 1) else 'with'} epoch {last:,}"


def _run_file(
    source: ConfigSource, findings: Findings
) -> tuple[dict[str, str | None], dict[str, Any], str, RunLength] | None:
    """What a file says that is no dataset config; None for one that is, or that is neither.

    That is `dataset_config` and the folders, each None where it is not named; the options that datasets read, as on the
    command line; the model family, where the file shows it (see `ARCHITECTURES`); and how long it trains.

    Raises:
        ConfigError: a value that the trainer could not compute with.
    """
    preset = source.path is not None and source.path.suffix.lower() == ".json"
    settings = without_headings(source.data)
    if "datasets" in source.data or not _TELLING & settings.keys():
        return None
    if "kohya_bucket" in source.data:
        findings.warning(
            "table-not-read", "", "[kohya_bucket] is ignored in a file for --config_file",
            "put it into the dataset config, or into a file that the environment variable KOHYA_BUCKET_CONFIG names",
        )  # fmt: skip
    family = _family(settings)
    if preset:
        settings = _as_the_gui_hands_over(settings)
    if any(str(one).strip().lower() == "train_t5xxl=true" for one in _listed(settings.get("network_args"))):
        settings = {**settings, "train_t5xxl": True}
    options = {
        name: _value(source, name, value, preset)
        for name, value in settings.items()
        if config_name(name) in DEFAULTS and name not in _NO_OPTIONS
    }
    paths = {name: _path(source, name, settings) for name in ("dataset_config", *_FOLDERS)}
    return paths, options, family, RunLength.of(source, settings, preset)


_OF_RUNS = {"pretrained_model_name_or_path", "network_module", "LoRA_type", "output_dir"}


def _without_settings(source: ConfigSource, findings: Findings) -> ConfigSource:
    """A dataset config without the settings of a trainer that stand in it, which are one mistake."""
    own = {name: value for name, value in source.data.items() if name in ("general", "datasets", "kohya_bucket")}
    others = {name: value for name, value in source.data.items() if name not in own}
    if "datasets" not in own or not _OF_RUNS & without_headings(others).keys():
        return source
    message = (
        f"{some(list(others))}: settings of a trainer, which a dataset config (--dataset_config) does not have; and in "
    )
    message += "a file for --config_file sd-scripts does not read [[datasets]]"
    remedy = "make two files: one with [general] and [[datasets]] for --dataset_config, and one with the rest"
    findings.error("misplaced-key", source.line_of(next(iter(others))).rstrip(", "), message, remedy, list(others))
    return replace(source, data=own)


def without_headings(data: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in a file for `--config_file`: sd-scripts takes what its tables hold as if it stood outside."""
    out: dict[str, Any] = {}
    for name, value in data.items():
        if name != "kohya_bucket":
            out.update(value if isinstance(value, dict) else {name: value})
    return out


def _as_the_gui_hands_over(settings: Mapping[str, Any]) -> dict[str, Any]:
    out = {_GUI_NAMES.get(name, name): value for name, value in settings.items() if value not in ("", None, False)}
    for box, name in _TEXT_CACHE_OF_BOX.items():
        for kind in ("", "_to_disk") if settings.get(box) is True else ():
            if settings.get(f"{name}_cache_text_encoder_outputs{kind}") is True:
                out[f"cache_text_encoder_outputs{kind}"] = True
    if settings.get("LoRA_type"):
        out["network_module"] = "of the GUI"
        out["network_train_unet_only"] = not _rate(settings.get("text_encoder_lr"))
    elif settings.get("sdxl") is True or settings.get("sdxl_checkbox") is True:
        out["train_text_encoder"] = any(_rate(settings.get(f"learning_rate_te{n}")) for n in (1, 2))
    if _FINE_TUNING & settings.keys():
        out["enable_bucket"] = True
        folder, file = settings.get("train_dir"), settings.get("caption_metadata_filename")
        if settings.get("use_latent_files") == "Yes":
            file = settings.get("latent_metadata_filename")
        if folder and file:
            out["in_json"] = f"{folder}/{file}"
    return out


def _rate(value: Any) -> bool:
    """Whether a preset's learning rate, a number or a text, is one."""
    with suppress(TypeError, ValueError):
        return float(value) > 0
    return False


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else str(value or "").split()


def _family(settings: Mapping[str, Any]) -> str:
    for box, family in _FAMILY_OF_BOX.items():
        if settings.get(box) is True:
            return family
    module = str(settings.get("network_module", "")).rpartition(".")[2]
    return next((name for name in ARCHITECTURES if module == f"lora_{name}"), "")


def _value(source: ConfigSource, name: str, value: Any, preset: bool) -> Any:
    """A number as datasets compute with it; a preset may have it as text."""
    usual = DEFAULTS[config_name(name)]
    if config_name(name) in ("resolution", "skip_image_resolution"):
        # sd-scripts splits a text at its comma, and ends with AttributeError at a number; the GUI writes texts.
        text = str(value) if preset or isinstance(value, str) else ""
        if not re.fullmatch(r"[\s\d,]+", text):
            shape = "a size like 512 or 512,768" if preset else "a size like '512' or '512,768', in quotes"
            raise ConfigError(f"{source.path}: {name} is {value!r}, but must be {shape}")
    if isinstance(usual, bool) or not isinstance(usual, (int, float)):
        return value
    return _number(source, name, value, preset, usual)


def _number(source: ConfigSource, name: str, value: Any, preset: bool, usual: _Number) -> _Number:
    number = math.nan
    if not isinstance(value, bool) and isinstance(value, (int, float, str) if preset else (int, float)):
        with suppress(ValueError, OverflowError):
            number = float(value)
    if not -1e9 < number < 1e9:
        raise ConfigError(f"{source.path}: {name} is {value!r}, but must be a number like {usual}")
    return type(usual)(number)


def _path(source: ConfigSource, name: str, settings: Mapping[str, Any]) -> str | None:
    value = settings.get(name)
    if value in (None, ""):
        return None
    if not isinstance(value, str) or "\0" in value:
        raise ConfigError(f"{source.path}: {name} is {value!r}, but must be a path")
    return value
