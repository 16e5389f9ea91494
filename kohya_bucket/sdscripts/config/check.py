"""Checking a config: what sd-scripts would refuse, all of it at once; inheritance; values that cannot work."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kohya_bucket.adapter.config_source import SIDES, Place, Source, check_range, near_key, read_table, unknown_key
from kohya_bucket.adapter.dataset_keys import rule_for
from kohya_bucket.adapter.findings import Findings, Severity
from kohya_bucket.errors import BucketSettingsError
from kohya_bucket.latents.architectures import ANY_TRAINER, NAME_THE_MODEL, Trainer, families_refusing
from kohya_bucket.sdscripts.config.keys import (
    ALL,
    KEYS,
    NEWEST,
    DatasetConfig,
    Kind,
    Level,
    Release,
    SubsetConfig,
    Supports,
    kind_of,
    known_keys,
    required_keys,
)  # fmt: skip

__all__ = [
    "REFUSALS", "CheckedConfig", "CheckedDataset", "buckets_follow", "check_config", "check_values", "note_overruled",
    "resolve",
]  # fmt: skip

#: Codes of the findings for which sd-scripts refuses the whole config.
REFUSALS = frozenset({"unknown-key", "misplaced-key", "wrong-type", "missing-key", "mixed-kinds", "not-a-table"})

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


@dataclass(frozen=True)
class CheckedDataset:
    """One `[[datasets]]` table without what sd-scripts would refuse. `number` counts from 1."""

    number: int
    kind: Kind
    table: dict[str, Any]
    subsets: list[dict[str, Any]]
    places: list[str] = field(default_factory=list)
    place: str = ""


@dataclass(frozen=True)
class CheckedConfig:
    """The usable part of a config."""

    general: dict[str, Any]
    datasets: list[CheckedDataset]
    kohya_bucket: Mapping[str, Any] | None


@dataclass
class _Checker:
    source: Source
    findings: Findings
    supports: Supports
    release: Release

    def general(self) -> dict[str, Any]:
        table = self.source.data.get("general", {})
        return self.keys(table, Level.GENERAL, None, ("general",), "[general]")

    def tables(self, holder: Mapping[str, Any], name: str, at: Place, where: str) -> list[tuple[int, dict[str, Any]]]:
        """The tables of a list, with their numbers from 0."""
        found = holder.get(name, [])
        if not isinstance(found, list):
            single = isinstance(found, dict)
            header = "[[datasets]]" if name == "datasets" else "[[datasets.subsets]]"
            message = f"{name} is {'one table' if single else repr(found)}, not a list of tables"
            self.error("not-a-table", (*at, name), where, message, f"write {header} in double brackets")
            found = [found] if single else []
        for i, table in enumerate(found):
            if not isinstance(table, dict):
                title = f"{where}, {name[:-1]} {i + 1}".lstrip(", ")
                self.error("not-a-table", (*at, name, i), title, f"{table!r} is not a table")
        return [(i, table) for i, table in enumerate(found) if isinstance(table, dict)]

    def dataset(self, i: int, table: dict[str, Any]) -> CheckedDataset | None:
        at: Place = ("datasets", i)
        where = f"dataset {i + 1}"
        subsets = self.tables(table, "subsets", at, where)
        kind = kind_of([subset for _, subset in subsets], self.supports)
        if kind is None:
            message = (
                "some of its subsets have a metadata_file and some have none: fine-tuning and DreamBooth subsets "
                "cannot share a dataset"
            )
            self.error("mixed-kinds", at, where, message, "give each kind a [[datasets]] of its own")
            return None
        checked, places = [], []
        for j, subset in subsets:
            inner: Place = (*at, "subsets", j)
            name = f"{where}, subset {j + 1}"
            checked.append(self.keys(subset, Level.SUBSET, kind, inner, name))
            places.append(self.source.line_of(*inner) + name)
            for key in sorted(required_keys(kind) - set(subset)):
                message = f"{key!r} is missing: every subset of a {kind.value} dataset needs it"
                meant = next((one for one in subset if near_key(str(one), {key}, _ELSEWHERE)), None)
                remedy = f"is {meant!r} meant to be {key!r}?" if meant else f"add {key} = '...'"
                self.error("missing-key", inner, name, message, remedy)
        own = {key: value for key, value in table.items() if key != "subsets"}
        clean = self.keys(own, Level.DATASET, kind, at, where)
        return CheckedDataset(i + 1, kind, clean, checked, places, self.source.line_of(*at) + where)

    def keys(self, table: Any, level: Level, kind: Kind | None, at: Place, where: str) -> dict[str, Any]:
        known = {name: KEYS[name].type for name in known_keys(level, kind, self.supports, self.release)}
        return read_table(
            table, known, at, where, self.source, self.findings, lambda name: self.unknown(name, level, kind)
        )

    def unknown(self, name: str, level: Level, kind: Kind | None) -> tuple[str, str, str]:
        """Code, message and remedy for a key that may not stand in a table."""
        if name == _TABLE:
            what = "the [kohya_bucket] table stands at the top level only"
            return "misplaced-key", what, "move it out, as [kohya_bucket]"
        key = KEYS.get(name)
        kinds = [kind] if kind else list(Kind)
        if key is not None and key.levels:
            if key.since and key.since not in self.release:
                what = f"{name!r} is new in sd-scripts {key.since.since}, and {self.release.name} does not know it"
                return "misplaced-key", what, "remove it or update sd-scripts"
            if kind is not None and kind not in key.kinds:
                of = " and ".join(sorted(one.value for one in key.kinds))
                return "misplaced-key", f"{name!r} is for {of} datasets; this is a {kind.value} dataset", "remove it"
        tables = {
            one.value: set().union(*(known_keys(one, of, self.supports, self.release) for of in kinds)) for one in Level
        }
        others = [one for one in KEYS if KEYS[one].levels]
        code, what, remedy = unknown_key(name, level.value, tables, _ELSEWHERE, others, _hint(name))
        if name in others and code == "unknown-key":
            return "misplaced-key", f"this trainer does not read {name!r}", "remove it"
        return code, what, remedy

    def unknown_at_top(self, name: str) -> None:
        near = near_key(name, _TOP)
        levels = KEYS[name].levels if name in KEYS else (Level.DATASET,) if name == "subsets" else ()
        if near:
            brackets = "[[datasets]]" if near == "datasets" else f"[{near}]"
            what, remedy = f"there is no table {name!r}", f"did you mean {brackets}?"
        elif levels:
            what = f"{name!r} stands at the top level, outside of every table"
            remedy = f"move it below {' or '.join(level.value for level in levels)}"
        else:
            what = f"there is no {'table' if isinstance(self.source.data[name], (dict, list)) else 'key'} {name!r}"
            remedy = f"a dataset config holds [general], [[datasets]] and [kohya_bucket] only{_hint(name)}"
        self.error("misplaced-key" if levels else "unknown-key", (name,), "", what, remedy, (name,))

    def error(
        self, code: str, at: Place, where: str, message: str, remedy: str = "", names: tuple[str, ...] = ()
    ) -> None:
        self.findings.error(code, (self.source.line_of(*at) + where).rstrip(", "), message, remedy, names)


def _hint(name: str) -> str:
    return f"; an option of the trainer stands on its command line (--{name}) or in its --config_file"


def check_config(
    source: Source, findings: Findings, supports: Supports = ALL, release: Release = NEWEST
) -> CheckedConfig:
    """Check every table, add what is wrong to `findings`, and return the rest."""
    checker = _Checker(source, findings, supports, release)
    for name in source.data.keys() - set(_TOP):
        checker.unknown_at_top(name)
    table = source.data.get(_TABLE)
    if table is not None and not isinstance(table, dict):
        checker.error("not-a-table", (_TABLE,), "", f"{_TABLE} is {table!r}, not a table", "write [kohya_bucket]")
        table = None
    general = checker.general()
    datasets = [checker.dataset(i, one) for i, one in checker.tables(source.data, "datasets", (), "")]
    return CheckedConfig(general, [dataset for dataset in datasets if dataset is not None], table)


def resolve(checked: CheckedConfig, arguments: Mapping[str, Any]) -> list[DatasetConfig]:
    """The datasets of a checked config: subset > dataset > general > `arguments` > default.

    As in sd-scripts, a value of None anywhere counts as not given.
    """
    return [_dataset(dataset, checked.general, arguments) for dataset in checked.datasets]


def _dataset(checked: CheckedDataset, general: Mapping[str, Any], arguments: Mapping[str, Any]) -> DatasetConfig:
    subsets = []
    for j, (table, place) in enumerate(zip(checked.subsets, checked.places, strict=True)):
        values = _inherited(SubsetConfig, checked.kind, table, checked.table, general, arguments)
        extension = values.get("caption_extension")
        if extension and not extension.startswith("."):
            values["caption_extension"] = "." + extension
        subsets.append(SubsetConfig(j + 1, place, checked.kind, **values))
    values = _inherited(DatasetConfig, checked.kind, checked.table, general, arguments)
    return DatasetConfig(checked.number, checked.place, checked.kind, tuple(subsets), **values)


def _inherited(of: type, kind: Kind, *tables: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the keys that sd-scripts' class for this kind takes; [general] may hold others."""
    out = {}
    for name in (one.name for one in dataclasses.fields(of) if one.name in KEYS):
        values = [table[name] for table in tables if table.get(name) is not None]
        if values and kind in KEYS[name].kinds:
            out[name] = values[0]
    return out


def check_values(
    dataset: DatasetConfig, findings: Findings, trainer: Trainer = ANY_TRAINER, *, predefined: bool = False
) -> None:
    """Check what can be checked without looking at an image. `predefined`: the metadata says the buckets."""
    where = dataset.place
    if not dataset.subsets:
        message = "it has no [[datasets.subsets]], so it has no images"
        findings.error("no-subsets", where, message, "add one with an image_dir")
    tables: list[DatasetConfig | SubsetConfig] = [dataset, *dataset.subsets]
    for table in tables:
        for name, key in KEYS.items():
            if key.allowed is not None and not (predefined and name == "resolution"):
                check_range(name, getattr(table, name, None), key.allowed, table.place, findings)
    if not predefined:
        _check_bucketing(dataset, findings, trainer)
    _check_validation(dataset, findings)


def buckets_follow(dataset: DatasetConfig, *, predefined: bool = False) -> bool:
    """Whether the images of a dataset can be placed, though a trainer may stop at something else in its config."""
    found = Findings()
    check_values(dataset, found, predefined=predefined)
    return {finding.code for finding in found.of(Severity.ERROR)} <= {"bucket-steps"}


def _check_bucketing(dataset: DatasetConfig, findings: Findings, trainer: Trainer) -> None:
    where = dataset.place
    if dataset.resolution is None:
        findings.error("no-resolution", where, "it has no resolution, and sd-scripts needs one", "resolution = 512")
        return
    if not SIDES.holds(dataset.resolution):
        return
    keys = dataset.dataset_keys
    if not dataset.enable_bucket:
        if not any(s.random_crop or s.face_crop_aug_range for s in dataset.subsets):
            width, height = dataset.resolution
            message = f"enable_bucket is not set: every image is cut to {width}x{height}, whatever its aspect"
            findings.note("no-buckets", where, message, "enable_bucket = true keeps the aspects")
        return
    try:
        rule_for(keys)
    except BucketSettingsError as error:
        findings.error("bucket-settings", where, str(error))
        return
    steps = dataset.bucket_reso_steps
    if steps % 8:
        message = f"bucket_reso_steps is {steps}, but latents need multiples of 8"
        findings.error("bucket-steps", where, message, "64; SDXL also takes 32")
        return
    refusing = trainer.refusing(steps)
    if refusing and not trainer.title:
        message = f"bucket_reso_steps is {steps}, which the trainers of these models refuse: {families_refusing(steps)}"
        findings.note(
            "bucket-steps", where, message, f"if you train one of them, use a step that it accepts; {NAME_THE_MODEL}"
        )
    elif refusing:
        accepted = -(-steps // trainer.step) * trainer.step
        message = f"bucket_reso_steps is {steps}, which is refused by "
        if len(refusing) == len(trainer.steps):
            message += f"{trainer.title}: only multiples of {trainer.step} are accepted"
            findings.error("bucket-steps", where, message, f"bucket_reso_steps = {accepted}")
        else:
            message += ", ".join(f"{file} (multiples of {least})" for file, least in refusing.items())
            other = next(file for file in trainer.steps if file not in refusing)
            remedy = f"bucket_reso_steps = {accepted} suits all; or name the trainer, as in --arch {other}"
            findings.warning("bucket-steps", where, message, remedy)


def _check_validation(dataset: DatasetConfig, findings: Findings) -> None:
    share, where = dataset.validation_split, dataset.place
    if not 0 < share <= 1:
        return
    if dataset.kind is Kind.FINE_TUNING:
        message = (
            "validation_split holds nothing back in fine-tuning datasets: sd-scripts validates on all training images"
        )
        findings.warning("validation-split", where, message, "use a DreamBooth dataset, or remove it")
        return
    if dataset.kind is Kind.DREAMBOOTH and dataset.validation_seed is None:
        message = (
            "validation_split without validation_seed: sd-scripts draws both parts independently, so that images are "
            "trained and validated, and differently in each run; the parts shown here are an example"
        )
        findings.warning("validation-seed", where, message, "validation_seed = 42")
    if dataset.kind is Kind.CONTROLNET:
        message = (
            "validation_split does not validate in ControlNet datasets: the images that are held back are in neither "
            "part, and sd-scripts validates on those that it trains"
        )
        findings.warning("validation-split", where, message, "remove it")


def note_overruled(given: Mapping[str, Any], checked: CheckedConfig, findings: Findings) -> None:
    """Say which command line values that decide buckets, batches or caches the config overrules.

    `given` is named as in the config.
    """
    datasets = [dataset.table for dataset in checked.datasets]
    subsets = [subset for dataset in checked.datasets for subset in dataset.subsets]
    for name, value in sorted((name, value) for name, value in given.items() if KEYS[name].decides):
        holders = [table[name] for table in [checked.general, *datasets, *subsets] if name in table]
        if any(holder != value for holder in holders):
            message = f"--{name} {_shown(value)} is ignored, because the config has {name} = {_shown(holders[0])}"
            findings.note("overruled", "", message, "the config wins over the command line, as in sd-scripts")


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
