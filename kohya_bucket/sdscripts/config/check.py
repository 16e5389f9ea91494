"""Checking a config's tables against the schema: what sd-scripts would refuse, all of it at once."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kohya_bucket.adapter.config_source import Place, Source
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.sdscripts.config.keys import (
    ALL,
    KEYS,
    NEWEST,
    Kind,
    Level,
    Release,
    Supports,
    Type,
    kind_of,
    known_keys,
    required_keys,
)
from kohya_bucket.sdscripts.config.model import DatasetConfig, SubsetConfig

__all__ = [
    "REFUSALS",
    "CheckedConfig",
    "CheckedDataset",
    "check_config",
    "levels_of",
    "nearest_key",
    "remedy_for",
    "resolve",
]

#: Codes of the findings for which sd-scripts refuses the whole config.
REFUSALS = frozenset({"unknown-key", "misplaced-key", "wrong-type", "missing-key", "mixed-kinds", "not-a-table"})

_TABLE = "kohya_bucket"


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


def check_config(
    source: Source, findings: Findings, supports: Supports = ALL, release: Release = NEWEST
) -> CheckedConfig:
    """Check every table, add what is wrong to `findings`, and return the rest."""
    return _Checker(source, findings, supports, release).run()


class _Checker:
    def __init__(self, source: Source, findings: Findings, supports: Supports, release: Release) -> None:
        self.source = source
        self.findings = findings
        self.supports = supports
        self.release = release

    def run(self) -> CheckedConfig:
        data = self.source.data
        for name in data:
            if name not in ("general", "datasets", _TABLE):
                self._unknown_at_top(name)
        table = data.get(_TABLE)
        if table is not None and not isinstance(table, dict):
            message = f"{_TABLE} is {table!r}, not a table"
            self._error("not-a-table", (_TABLE,), "", message, "write [kohya_bucket]")
            table = None
        return CheckedConfig(self._general(), self._datasets(), table)

    # -- tables --------------------------------------------------------------------------------------

    def _general(self) -> dict[str, Any]:
        general = self.source.data.get("general", {})
        if not isinstance(general, dict):
            what = "a list of tables" if isinstance(general, list) else repr(general)
            self._error("not-a-table", ("general",), "", f"general is {what}, not a table", "write [general]")
            return {}
        return self._keys(general, Level.GENERAL, None, ("general",), "[general]")

    def _datasets(self) -> list[CheckedDataset]:
        datasets = self.source.data.get("datasets", [])
        if not isinstance(datasets, list):
            is_table = isinstance(datasets, dict)
            what = "one table" if is_table else repr(datasets)
            remedy = "write [[datasets]] in double brackets, and [[datasets.subsets]] after it"
            self._error("not-a-table", ("datasets",), "", f"datasets is {what}, not a list of tables", remedy)
            datasets = [datasets] if is_table else []
        out = []
        for i, table in enumerate(datasets):
            place: Place = ("datasets", i)
            if not isinstance(table, dict):
                self._error("not-a-table", place, f"dataset {i + 1}", f"{table!r} is not a table", "write [[datasets]]")
                continue
            checked = self._dataset(i, table, place)
            if checked is not None:
                out.append(checked)
        return out

    def _dataset(self, i: int, table: dict[str, Any], place: Place) -> CheckedDataset | None:
        where = f"dataset {i + 1}"
        subsets = table.get("subsets", [])
        if not isinstance(subsets, list):
            is_table = isinstance(subsets, dict)
            what = "one table" if is_table else repr(subsets)
            remedy = "write [[datasets.subsets]] in double brackets"
            self._error("not-a-table", (*place, "subsets"), where, f"subsets is {what}, not a list of tables", remedy)
            subsets = [subsets] if is_table else []
        kept = []
        for j, subset in enumerate(subsets):
            if isinstance(subset, dict):
                kept.append((j, subset))
            else:
                message = f"{subset!r} is not a table"
                self._error("not-a-table", (*place, "subsets", j), f"{where}, subset {j + 1}", message)
        kind = kind_of([s for _, s in kept], self.supports)
        if kind is None:
            self._mixed(place, where, [s for _, s in kept])
            return None
        own = {key: value for key, value in table.items() if key != "subsets"}
        checked, places = [], []
        for j, subset in kept:
            inner: Place = (*place, "subsets", j)
            name = f"{where}, subset {j + 1}"
            clean = self._keys(subset, Level.SUBSET, kind, inner, name)
            missing = sorted(required_keys(kind) - set(subset))
            for key in missing:
                why = f"{key!r} is missing: every subset of a {kind.value} dataset needs it"
                self._error("missing-key", inner, name, why, self._missing_remedy(key, set(subset)))
            checked.append(clean)
            places.append(self.source.line_of(*inner) + name)
        clean_table = self._keys(own, Level.DATASET, kind, place, where)
        return CheckedDataset(i + 1, kind, clean_table, checked, places, self.source.line_of(*place) + where)

    def _mixed(self, place: Place, where: str, subsets: list[dict[str, Any]]) -> None:
        with_file = [str(j + 1) for j, s in enumerate(subsets) if "metadata_file" in s]
        without = [str(j + 1) for j, s in enumerate(subsets) if "metadata_file" not in s]
        message = (
            f"subset {', '.join(with_file)} has a metadata_file and subset {', '.join(without)} has none: "
            "fine-tuning and DreamBooth subsets cannot share a dataset"
        )
        self._error("mixed-kinds", place, where, message, "give each kind a [[datasets]] of its own")

    # -- keys ----------------------------------------------------------------------------------------

    def _keys(self, table: dict[str, Any], level: Level, kind: Kind | None, place: Place, where: str) -> dict[str, Any]:
        known = known_keys(level, kind, self.supports, self.release)
        clean = {}
        for name, value in table.items():
            here = (*place, name)
            if name not in known:
                what, remedy = remedy_for(str(name), level, kind, self.supports, self.release)
                code = "misplaced-key" if name in KEYS or name == _TABLE else "unknown-key"
                self._error(code, here, where, what, remedy, (str(name),))
                continue
            wanted = KEYS[name].type
            if not wanted.accepts(value):
                message = f"{name} is {value!r}, but must be {wanted.value}"
                self._error("wrong-type", here, where, message, _type_remedy(name, wanted, value), (name,))
                continue
            if isinstance(value, bool) and wanted in (Type.INT, Type.SIZE, Type.NUMBER):
                message = f"{name} is {str(value).lower()}, which sd-scripts reads as {int(value)}"
                self.findings.warning("bool-as-number", self._where(here, where), message, "write a number", (name,))
            clean[name] = wanted.convert(value)
        return clean

    def _unknown_at_top(self, name: str) -> None:
        place = (name,)
        near = nearest_key(name, {"general", "datasets", _TABLE})
        if near:
            brackets = "[[datasets]]" if near == "datasets" else f"[{near}]"
            self._error("unknown-key", place, "", f"there is no table {name!r}", f"did you mean {brackets}?", (name,))
        elif name in KEYS:
            message = f"{name!r} stands at the top level, outside of every table"
            remedy = f"move it below {' or '.join(level.value for level in self._homes(name))}"
            self._error("misplaced-key", place, "", message, remedy, (name,))
        elif name == "subsets":
            remedy = "write [[datasets.subsets]], below a [[datasets]]"
            self._error("misplaced-key", place, "", "'subsets' stands at the top level", remedy, (name,))
        elif isinstance(self.source.data[name], (dict, list)):
            remedy = "a dataset config holds [general], [[datasets]] and [kohya_bucket] only"
            self._error("unknown-key", place, "", f"there is no table {name!r}", remedy, (name,))
        else:
            what, remedy = remedy_for(name, Level.GENERAL, None, self.supports, self.release)
            self._error("unknown-key", place, "", what, remedy, (name,))

    def _homes(self, name: str) -> list[Level]:
        return levels_of(name, None, self.supports, self.release) or [Level.SUBSET]

    def _missing_remedy(self, key: str, present: set[str]) -> str:
        for name in sorted(present):
            if nearest_key(name, {key}) == key:
                return f"is {name!r} meant to be {key!r}?"
        return f"add {key} = '...'"

    def _where(self, place: Place, where: str) -> str:
        return (self.source.line_of(*place) + where).rstrip(", ")

    def _error(
        self, code: str, place: Place, where: str, message: str, remedy: str = "", names: tuple[str, ...] = ()
    ) -> None:
        self.findings.error(code, self._where(place, where), message, remedy, names)


def _type_remedy(name: str, wanted: Type, value: Any) -> str:
    if isinstance(value, str):
        text = value.strip()
        if wanted is Type.BOOL and text.lower() in ("true", "false"):
            return f"write {name} = {text.lower()}, without quotes"
        if wanted in (Type.INT, Type.NUMBER, Type.FLOAT) and _is_number(text):
            return f"write {name} = {float(text) if wanted is Type.FLOAT else text}, without quotes"
        if wanted is Type.SIZE:
            parts = [p.strip() for p in text.replace("x", ",").split(",")]
            if parts and all(p.isdigit() for p in parts):
                return f"write {name} = {parts[0] if len(parts) == 1 else '[' + ', '.join(parts[:2]) + ']'}"
    if isinstance(value, bool):
        return "write a number" if wanted is Type.FLOAT else ""
    if wanted is Type.FLOAT and isinstance(value, int):
        return f"write {name} = {float(value)}, with a decimal point"
    if wanted is Type.BOOL and value in (0, 1):
        return f"write {name} = {'true' if value else 'false'}"
    if wanted is Type.INT and isinstance(value, float) and value.is_integer():
        return f"write {name} = {int(value)}"
    if wanted is Type.STR and isinstance(value, list) and len(value) == 1:
        return "write it without brackets; a second folder is a second [[datasets.subsets]]"
    if wanted is Type.STR and isinstance(value, list):
        return "one value only; a second folder is a second [[datasets.subsets]]"
    if wanted is Type.TWO_FLOATS and isinstance(value, list) and len(value) == 2:
        return f"write {name} = [{', '.join(str(float(v)) for v in value if isinstance(v, (int, float)))}]"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# What an unknown key was probably meant to be, and where it belongs.


# Names that mean the same elsewhere: sd-scripts' own command line, its folder options, the GUI, musubi-tuner.
_OTHER_NAMES = {
    "train_batch_size": "batch_size",
    "dataset_repeats": "num_repeats",
    "repeats": "num_repeats",
    "caption_extention": "caption_extension",
    "caption_ext": "caption_extension",
    "train_data_dir": "image_dir",
    "image_directory": "image_dir",
    "img_dir": "image_dir",
    "path": "image_dir",
    "in_json": "metadata_file",
    "image_jsonl_file": "metadata_file",
    "control_directory": "conditioning_data_dir",
    "instance_prompt": "class_tokens",
    "width": "resolution",
    "height": "resolution",
    "bucket": "enable_bucket",
    "enable_buckets": "enable_bucket",
    "min_bucket_resolution": "min_bucket_reso",
    "max_bucket_resolution": "max_bucket_reso",
    "bucket_reso_step": "bucket_reso_steps",
    "no_upscale": "bucket_no_upscale",
    "caption_dropout_every_n_epoch": "caption_dropout_every_n_epochs",
}

# Options of the trainers that are often put into the dataset config.
_TRAINER_OPTIONS = frozenset(
    [
        "cache_latents",
        "cache_latents_to_disk",
        "cache_text_encoder_outputs",
        "cache_text_encoder_outputs_to_disk",
        "vae_batch_size",
        "skip_cache_check",
        "debug_dataset",
        "dataset_class",
        "reg_data_dir",
        "prior_loss_weight",
        "max_token_length",
        "max_train_steps",
        "max_train_epochs",
        "max_data_loader_n_workers",
        "persistent_data_loader_workers",
        "seed",
        "gradient_accumulation_steps",
        "gradient_checkpointing",
        "mixed_precision",
        "full_fp16",
        "full_bf16",
        "learning_rate",
        "unet_lr",
        "text_encoder_lr",
        "lr_scheduler",
        "lr_warmup_steps",
        "optimizer_type",
        "optimizer_args",
        "network_module",
        "network_dim",
        "network_alpha",
        "network_args",
        "network_weights",
        "output_dir",
        "output_name",
        "save_every_n_epochs",
        "save_every_n_steps",
        "save_model_as",
        "save_precision",
        "pretrained_model_name_or_path",
        "vae",
        "v2",
        "v_parameterization",
        "clip_skip",
        "noise_offset",
        "min_snr_gamma",
        "sample_prompts",
        "sample_every_n_epochs",
        "sample_every_n_steps",
        "logging_dir",
        "log_with",
        "xformers",
        "sdpa",
        "lowram",
        "resume",
        "masked_loss",
        "weighted_captions",
        "train_inpainting",
        "dataset_config",
        "config_file",
    ]
)


def nearest_key(name: str, known: set[str]) -> str | None:
    """The known key that `name` was probably meant to be, or None if none resembles it."""
    plain = name.strip().strip("=").strip().lower().replace("-", "_").replace(" ", "_")
    for candidate in (plain, _OTHER_NAMES.get(plain, ""), _snake(name)):
        if candidate in known:
            return candidate
    close = difflib.get_close_matches(plain, sorted(known), n=1, cutoff=0.7)
    if not close:
        joined = {key.replace("_", ""): key for key in sorted(known)}
        close = [joined[m] for m in difflib.get_close_matches(plain.replace("_", ""), joined, n=1, cutoff=0.75)]
    return close[0] if close else None


def levels_of(key: str, kind: Kind | None, supports: Supports = ALL, release: Release = NEWEST) -> list[Level]:
    """The tables in which `key` is known, for datasets of this kind (of any kind if None)."""
    kinds = [kind] if kind else list(Kind)
    return [
        level
        for level in (Level.GENERAL, Level.DATASET, Level.SUBSET)
        if any(key in known_keys(level, k, supports, release) for k in kinds)
    ]


def remedy_for(
    name: str, level: Level, kind: Kind | None, supports: Supports = ALL, release: Release = NEWEST
) -> tuple[str, str]:
    """`(what, remedy)` for a key that is not allowed in this table: why it is not, and what to do."""
    if name == "kohya_bucket":
        return "the [kohya_bucket] table stands at the top level only", "move it out, as [kohya_bucket]"
    if name in KEYS:
        since = KEYS[name].since
        if since and since not in release:
            what = f"{name!r} is new in sd-scripts {since.since}, and {release.name} does not know it"
            return what, "remove it or update sd-scripts"
        if kind is not None and kind not in KEYS[name].kinds and levels_of(name, None, supports, release):
            kinds = sorted(k.value for k in KEYS[name].kinds)
            return f"{name!r} is for {' and '.join(kinds)} datasets; this is a {kind.value} dataset", "remove it"
        homes = levels_of(name, kind, supports, release)
        if homes:
            return f"{name!r} does not belong in {level.value}", f"move it to {_either(homes)}"
        return f"this trainer does not read {name!r}", "remove it"
    here = known_keys(level, kind, supports, release)
    near = nearest_key(name, here)
    if near:
        return f"there is no key {name!r}", f"did you mean {near!r}?"
    near = nearest_key(name, set(KEYS))
    if near:
        homes = levels_of(near, kind, supports, release) or levels_of(near, None, supports, release)
        return f"there is no key {name!r}", f"did you mean {near!r}? It belongs in {_either(homes)}"
    if name.replace("-", "_") in _TRAINER_OPTIONS:
        return (
            f"{name!r} is an option of the trainer, not of a dataset",
            f"give it on the command line (--{name.replace('-', '_')}) or in the --config_file",
        )
    return f"there is no key {name!r}", f"remove it; {level.value} knows {', '.join(sorted(here))}"


def _either(levels: list[Level]) -> str:
    return " or ".join(level.value for level in levels)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


# Inheritance: which value each dataset and subset ends up with.


_SUBSET_FIELDS = [f.name for f in dataclasses.fields(SubsetConfig) if f.name not in ("number", "place", "kind")]
_DATASET_FIELDS = [
    f.name for f in dataclasses.fields(DatasetConfig) if f.name not in ("number", "place", "kind", "subsets")
]
# Keys that sd-scripts' classes for these kinds do not take, though [general] may hold them.
_NOT_TAKEN = {
    Kind.DREAMBOOTH: frozenset({"metadata_file", "conditioning_data_dir"}),
    Kind.FINE_TUNING: frozenset({"is_reg", "class_tokens", "caption_extension", "cache_info", "conditioning_data_dir"}),
    Kind.CONTROLNET: frozenset({"is_reg", "class_tokens", "alpha_mask", "metadata_file"}),
}


def resolve(checked: CheckedConfig, arguments: Mapping[str, Any]) -> list[DatasetConfig]:
    """The datasets of a checked config: subset > dataset > general > `arguments` > default.

    As in sd-scripts, a value of None anywhere counts as not given.
    """
    return [_dataset(dataset, checked.general, arguments) for dataset in checked.datasets]


def _dataset(checked: CheckedDataset, general: Mapping[str, Any], arguments: Mapping[str, Any]) -> DatasetConfig:
    subsets = []
    for j, (table, place) in enumerate(zip(checked.subsets, checked.places, strict=True)):
        values = _first([table, checked.table, general, arguments], _SUBSET_FIELDS, _NOT_TAKEN[checked.kind])
        extension = values.get("caption_extension")
        if extension and not extension.startswith("."):
            values["caption_extension"] = "." + extension
        subsets.append(SubsetConfig(number=j + 1, place=place, kind=checked.kind, **values))
    values = _first([checked.table, general, arguments], _DATASET_FIELDS, frozenset())
    if checked.kind is not Kind.DREAMBOOTH:
        values.pop("prior_loss_weight", None)
    return DatasetConfig(
        number=checked.number, place=checked.place, kind=checked.kind, subsets=tuple(subsets), **values
    )


def _first(tables: list[Mapping[str, Any]], names: list[str], skipped: frozenset[str]) -> dict[str, Any]:
    out = {}
    for name in names:
        if name in skipped:
            continue
        for table in tables:
            value = table.get(name)
            if value is not None:
                out[name] = value
                break
    return out
