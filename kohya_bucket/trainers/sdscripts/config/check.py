"""Checking a config: what sd-scripts would refuse, all of it at once; inheritance; values that cannot work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kohya_bucket.buckets.families import FAMILIES, NAME_THE_MODEL
from kohya_bucket.errors import BucketSettingsError
from kohya_bucket.trainers.door.config_source import (
    ANYTHING,
    SIDES,
    ConfigSource,
    TablePath,
    check_range,
    near_key,
    read_table,
    unknown_key,
)
from kohya_bucket.trainers.door.dataset_keys import rule_for
from kohya_bucket.trainers.door.findings import Findings, Severity
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.sdscripts.config.keys import (
    KEYS,
    DatasetConfig,
    DatasetKind,
    Level,
    SubsetConfig,
    arguments,
    config_name,
    kind_of,
    known_keys,
    required_keys,
)
from kohya_bucket.trainers.sdscripts.config.releases import NEWEST, Release
from kohya_bucket.trainers.sdscripts.families import ANY_TRAINER, families_refusing

_TABLE = "kohya_bucket"
_TOP = ("general", "datasets", _TABLE)
# What keys are called on sd-scripts' command line, by its GUI and by musubi-tuner, where the names do not resemble.
_ELSEWHERE = {
    "dataset_repeats": "num_repeats",
    "train_data_dir": "image_dir",
    "path": "image_dir",
    "in_json": "metadata_file",
    "image_jsonl_file": "metadata_file",
    "control_directory": "conditioning_data_dir",
    "instance_prompt": "class_tokens",
    "width": "resolution",
    "height": "resolution",
}


def read_datasets(
    source: ConfigSource, findings: Findings, command_line: Mapping[str, Any] | None = None, release: Release = NEWEST
) -> list[DatasetConfig]:
    """The datasets of a config: subset > dataset > general > command line > default; None counts as not given.

    Everything that sd-scripts would refuse is added to `findings` and left out. `command_line` holds options by
    the names they have there.
    """
    command_line = {config_name(name): value for name, value in (command_line or {}).items() if value is not None}
    reader = _Reader(source, findings, release, arguments(command_line))
    datasets = reader.config()
    for name in sorted(name for name in command_line if name in reader.arguments and KEYS[name].decides):
        value, holders = reader.arguments[name], [table[name] for table in reader.tables if name in table]
        if any(holder != value for holder in holders):
            message = f"--{name} {_shown(value)} is ignored, because the config has {name} = {_shown(holders[0])}"
            findings.note("overruled", "", message, "the config wins over the command line, as in sd-scripts")
    return datasets


@dataclass
class _Reader:
    """`arguments`: the options of the command line with their defaults; `tables`: all that were read.

    `unread`: where keys that decide buckets or batches have values that cannot be read: [general], or a dataset.
    """

    source: ConfigSource
    findings: Findings
    release: Release
    arguments: Mapping[str, Any]
    tables: list[dict[str, Any]] = field(default_factory=list)
    unread: set[TablePath] = field(default_factory=set)

    def config(self) -> list[DatasetConfig]:
        data = self.source.data
        for name in [name for name in data if name not in _TOP]:
            self.error((name,), "", *self.unknown(name, "the top level"), (name,))
        general = self.keys(data.get("general", {}), Level.GENERAL, None, ("general",), "[general]")
        datasets = [self.dataset(i, table, general) for i, table in self.listed(data, "datasets", (), "")]
        return [dataset for dataset in datasets if dataset is not None]

    def listed(
        self, holder: Mapping[str, Any], name: str, at: TablePath, where: str
    ) -> list[tuple[int, dict[str, Any]]]:
        """The tables of a list, with their numbers from 0."""
        tables = holder.get(name, [])
        if not isinstance(tables, list):
            what, tables = ("one table", [tables]) if isinstance(tables, dict) else (repr(tables), [])
            header = "[[datasets]]" if name == "datasets" else "[[datasets.subsets]]"
            message = f"{name} is {what}, not a list of tables"
            self.error((*at, name), where, "not-a-table", message, f"write {header} in double brackets")
        for i, table in enumerate(tables):
            if not isinstance(table, dict):
                title = f"{where}, {name[:-1]} {i + 1}".lstrip(", ")
                self.error((*at, name, i), title, "not-a-table", f"{table!r} is not a table")
        return [(i, table) for i, table in enumerate(tables) if isinstance(table, dict)]

    def dataset(self, i: int, table: dict[str, Any], general: Mapping[str, Any]) -> DatasetConfig | None:
        at: TablePath = ("datasets", i)
        where = f"dataset {i + 1}"
        listed = self.listed(table, "subsets", at, where)
        kind = kind_of([subset for _, subset in listed])
        if kind is None:
            message = "some of its subsets have a metadata_file and some have none: fine-tuning and DreamBooth subsets "
            message += "cannot share a dataset"
            self.error(at, where, "mixed-kinds", message, "give each kind a [[datasets]] of its own")
            return None
        keys = self.keys({k: v for k, v in table.items() if k != "subsets"}, Level.DATASET, kind, at, where)
        subsets = []
        for number, (j, subset) in enumerate(listed, 1):
            inner: TablePath = (*at, "subsets", j)
            name = f"{where}, subset {j + 1}"
            clean = self.keys(subset, Level.SUBSET, kind, inner, name)
            for key in sorted(required_keys(kind) - subset.keys()):
                message = f"{key!r} is missing: every subset of a {kind.value} dataset needs it"
                meant = next((one for one in subset if near_key(str(one), {key}, _ELSEWHERE)), None)
                remedy = f"is {meant!r} meant to be {key!r}?" if meant else f"add {key} = '...'"
                self.error(inner, name, "missing-key", message, remedy)
            values = _inherited(SubsetConfig, kind, clean, keys, general, self.arguments)
            extension = values.get("caption_extension")
            if extension and not extension.startswith("."):
                values["caption_extension"] = "." + extension
            subsets.append(SubsetConfig(number, self.source.line_of(*inner) + name, kind, **values))
        values = _inherited(DatasetConfig, kind, keys, general, self.arguments)
        readable = self.unread.isdisjoint((("general",), at))
        return DatasetConfig(i + 1, self.source.line_of(*at) + where, kind, tuple(subsets), readable, **values)

    def keys(self, table: Any, level: Level, kind: DatasetKind | None, at: TablePath, where: str) -> dict[str, Any]:
        """The usable keys of one table."""
        allowed = known_keys(level, kind, self.release)
        types = {name: KEYS[name].type if name in KEYS else ANYTHING for name in allowed}
        if unknown := sorted(allowed - KEYS.keys() & set(table if isinstance(table, dict) else ())):
            message = f"{', '.join(unknown)}: only {self.release.name} has such keys; what they do is not known here"
            self.findings.note("own-key", where, message, names=unknown)
        read = read_table(
            table, types, at, where, self.source, self.findings, lambda name: self.unknown(name, level.value, kind)
        )
        self.tables.append(read)
        if isinstance(table, dict) and any(
            KEYS[key].decides for key in allowed & KEYS.keys() & table.keys() - read.keys()
        ):
            self.unread.add(at[:2])
        return read

    def unknown(self, name: str, here: str, kind: DatasetKind | None = None) -> tuple[str, str, str]:
        """Code, message and remedy for a key that may not stand in a table."""
        if name == _TABLE:
            what = "the [kohya_bucket] table stands at the top level only"
            return "misplaced-key", what, "move it out, as [kohya_bucket]"
        key = KEYS.get(name)
        if key is not None and key.levels and not any(name in known_keys(one, None, self.release) for one in Level):
            new = f"is new in sd-scripts {key.since}, and" if key.since else "is a key that"
            return (
                "misplaced-key",
                f"{name!r} {new} {self.release.name} does not know it",
                "remove it or update sd-scripts",
            )
        if key is not None and key.levels and kind is not None and kind not in key.kinds:
            of = " and ".join(sorted(one.value for one in key.kinds))
            return "misplaced-key", f"{name!r} is for {of} datasets; this is a {kind.value} dataset", "remove it"
        tables = {one.value: known_keys(one, None, self.release) for one in Level}
        tables[Level.DATASET.value].add("subsets")
        tables["the top level"] = set(_TOP)
        hint = f"; an option of the trainer stands on its command line (--{name}) or in its --config_file"
        return unknown_key(name, here, tables, _ELSEWHERE, hint)

    def error(
        self, at: TablePath, where: str, code: str, message: str, remedy: str = "", names: tuple[str, ...] = ()
    ) -> None:
        self.findings.error(code, (self.source.line_of(*at) + where).rstrip(", "), message, remedy, names)


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _inherited(of: type, kind: DatasetKind, *tables: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys that sd-scripts' class for this kind takes; [general] may hold others."""
    names = {one.name for one in dataclasses.fields(of) if one.name in KEYS and kind in KEYS[one.name].kinds}
    values = [(name, value) for table in reversed(tables) for name, value in table.items()]
    return {name: value for name, value in values if name in names and value is not None}


def check_values(dataset: DatasetConfig, findings: Findings, programs: Programs = ANY_TRAINER) -> None:
    """Check what can be checked without looking at an image."""
    if not dataset.subsets and not any(one.code == "no-repeat-folders" for one in findings):  # folders, and no config
        message = "it has no [[datasets.subsets]], so it has no images"
        findings.error("no-subsets", dataset.place, message, "add one with an image_dir")
    tables: list[DatasetConfig | SubsetConfig] = [dataset, *dataset.subsets]
    for table in tables:
        for name, key in KEYS.items():
            if key.allowed is not None:
                check_range(name, getattr(table, name, None), key.allowed, table.place, findings)
    _check_bucketing(dataset, findings, programs)
    if 0 < dataset.validation_split <= 1:
        _check_validation(dataset, findings)


def buckets_follow(dataset: DatasetConfig) -> bool:
    """Whether the images of a dataset can be placed, though a trainer may stop at something else in its config."""
    findings = Findings()
    check_values(dataset, findings)
    return dataset.readable and {finding.code for finding in findings.of(Severity.ERROR)} <= {"bucket-steps"}


def _check_bucketing(dataset: DatasetConfig, findings: Findings, programs: Programs) -> None:
    where = dataset.place
    if dataset.resolution is None:
        remedy = f"resolution = {FAMILIES.get(programs.family, FAMILIES['sd']).resolution}"
        findings.error("no-resolution", where, "it has no resolution, and sd-scripts needs one", remedy)
    elif not SIDES.fits(dataset.resolution):
        return
    elif dataset.enable_bucket:
        try:
            rule_for(dataset.dataset_keys)
        except BucketSettingsError as error:
            findings.error("bucket-settings", where, str(error))
        else:
            _check_steps(dataset.bucket_reso_steps, where, findings, programs)
    elif not any(s.random_crop or s.face_crop_aug_range for s in dataset.subsets):
        width, height = dataset.resolution
        message = f"enable_bucket is not set: every image is cut to {width}x{height}, whatever its aspect"
        findings.note("no-buckets", where, message, "enable_bucket = true keeps the aspects")


def _check_steps(steps: int, where: str, findings: Findings, programs: Programs) -> None:
    """Whether latents, and the trainers of the model, can have sides in such steps."""
    message, refusing = f"bucket_reso_steps is {steps}", programs.refusing(steps)
    accepted = -(-steps // programs.step) * programs.step
    if steps % 8:
        findings.error("bucket-steps", where, f"{message}, but latents need multiples of 8", "64; SDXL also takes 32")
    elif refusing and not programs.title:
        message += f", which the trainers of these models refuse: {families_refusing(steps)}"
        remedy = f"if you train one of them, use a step that it accepts; {NAME_THE_MODEL}"
        findings.note("bucket-steps", where, message, remedy)
    elif refusing and len(refusing) == len(programs.steps):
        message += f", which is refused by {programs.title}: only multiples of {programs.step} are accepted"
        findings.error("bucket-steps", where, message, f"bucket_reso_steps = {accepted}")
    elif refusing:
        files = ", ".join(f"{file} (multiples of {least})" for file, least in refusing.items())
        other = next(file for file in programs.steps if file not in refusing)
        remedy = f"bucket_reso_steps = {accepted} suits all; or name the trainer, as in --arch {other}"
        findings.warning("bucket-steps", where, f"{message}, which is refused by {files}", remedy)


_HOLDS_NOTHING_BACK = {
    DatasetKind.FINE_TUNING: (
        "validation_split holds nothing back in fine-tuning datasets: sd-scripts validates on all training images",
        "use a DreamBooth dataset, or remove it",
    ),
    DatasetKind.CONTROLNET: (
        "validation_split does not validate in ControlNet datasets: the images that are held back are in neither "
        "part, and sd-scripts validates on those that it trains",
        "remove it",
    ),
}


def _check_validation(dataset: DatasetConfig, findings: Findings) -> None:
    if dataset.kind in _HOLDS_NOTHING_BACK:
        findings.warning("validation-split", dataset.place, *_HOLDS_NOTHING_BACK[dataset.kind])
    elif dataset.validation_seed is None:
        message = (
            "validation_split without validation_seed: sd-scripts draws both parts independently, so that images are "
            "trained and validated, and differently in each run; the parts shown here are an example"
        )
        findings.warning("validation-seed", dataset.place, message, "validation_seed = 42")
