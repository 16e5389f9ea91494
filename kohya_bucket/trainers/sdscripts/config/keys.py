"""The keys of a dataset config: where each may stand, its type, default and range, and what it becomes.

`SubsetConfig` and `DatasetConfig` are the table: their fields are the keys. Source: the schemas that `ConfigSanitizer`
of sd-scripts builds (library/config_util.py), which depend on the kind of dataset and on what the trainer supports, and
the options of `add_dataset_arguments` and `add_training_arguments`, which count where the config is silent.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from kohya_bucket.trainers.door.config_source import (
    FLAG,
    FRACTION,
    FRACTIONS,
    NUMBER,
    ONE_OR_MORE,
    SIDES,
    SIZE,
    TABLE,
    TEXT,
    WHOLE,
    Type,
    parse_resolution,
)
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.sdscripts.config.releases import NEWEST, Release


class DatasetKind(enum.Enum):
    """The three kinds of datasets."""

    DREAMBOOTH = "dreambooth"
    FINE_TUNING = "fine-tuning"
    CONTROLNET = "controlnet"


class Level(enum.Enum):
    """The tables of a config."""

    GENERAL = "[general]"
    DATASET = "[[datasets]]"
    SUBSET = "[[datasets.subsets]]"


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        type: of its value.
        levels: the tables in which it may stand; none for what is an option of the command line alone.
        kinds: of datasets that have it.
        required: kinds whose subsets must have it.
        since: the version that brought it; "" for one that was always there.
        allowed: its range.
        option: whether the command line has it, too.
        decides: whether buckets, batches, or what is cached depend on it.
    """

    type: Type
    levels: tuple[Level, ...]
    kinds: frozenset[DatasetKind] = frozenset(DatasetKind)
    required: frozenset[DatasetKind] = frozenset()
    since: str = ""
    allowed: Type | None = None
    option: bool = True
    decides: bool = True


_DB, _FT, _CN = (frozenset({kind}) for kind in DatasetKind)
_OF_DATASETS, _EVERYWHERE, _OWN = (Level.GENERAL, Level.DATASET), tuple(Level), (Level.SUBSET,)
_INTERPOLATIONS = ("lanczos", "nearest", "bilinear", "linear", "bicubic", "cubic", "area", "box")
_FILTER = Type(f"one of {', '.join(_INTERPOLATIONS)}", _INTERPOLATIONS.__contains__)
_SHARE = Type("from 0 to 1", lambda value: 0 <= value <= 1)


def _key(type_: Type, default: Any, levels: tuple[Level, ...], **more: Any) -> Any:
    usual: dict[str, Any] = {"default_factory": dict} if default is MISSING else {"default": default}
    return field(**usual, metadata={"key": Key(type_, levels, **more)})


@dataclass(frozen=True)
class SubsetConfig:
    """One subset, with every value that sd-scripts would use. `place` names it in messages."""

    number: int
    place: str
    kind: DatasetKind
    image_dir: str | None = _key(TEXT, None, _OWN, required=_DB | _CN, option=False)
    metadata_file: str | None = _key(TEXT, None, _OWN, kinds=_FT, required=_FT, option=False)
    conditioning_data_dir: str | None = _key(TEXT, None, _OWN, kinds=_CN, required=_CN, option=False)
    num_repeats: int = _key(WHOLE, 1, _EVERYWHERE)
    is_reg: bool = _key(FLAG, False, _OWN, kinds=_DB, option=False)
    class_tokens: str | None = _key(TEXT, None, _EVERYWHERE, kinds=_DB, option=False)
    caption_extension: str = _key(TEXT, ".caption", _EVERYWHERE, kinds=_DB | _CN)
    cache_info: bool = _key(FLAG, False, _EVERYWHERE, kinds=_DB | _CN)
    alpha_mask: bool = _key(FLAG, False, _OWN, kinds=_DB | _FT)
    caption_separator: str = _key(TEXT, ",", _EVERYWHERE)
    enable_wildcard: bool = _key(FLAG, False, _EVERYWHERE)
    color_aug: bool = _key(FLAG, False, _EVERYWHERE)
    flip_aug: bool = _key(FLAG, False, _EVERYWHERE)
    face_crop_aug_range: tuple[float, float] | None = _key(FRACTIONS, None, _EVERYWHERE)
    random_crop: bool = _key(FLAG, False, _EVERYWHERE)
    resize_interpolation: str | None = _key(TEXT, None, _EVERYWHERE, allowed=_FILTER)
    shuffle_caption: bool = _key(FLAG, False, _EVERYWHERE, decides=False)
    keep_tokens: int = _key(WHOLE, 0, _EVERYWHERE, decides=False)
    keep_tokens_separator: str = _key(TEXT, "", _EVERYWHERE, decides=False)
    secondary_separator: str | None = _key(TEXT, None, _EVERYWHERE, decides=False)
    caption_prefix: str | None = _key(TEXT, None, _EVERYWHERE, decides=False)
    caption_suffix: str | None = _key(TEXT, None, _EVERYWHERE, decides=False)
    caption_dropout_rate: float = _key(NUMBER, 0.0, _EVERYWHERE, decides=False)
    caption_dropout_every_n_epochs: int = _key(WHOLE, 0, _EVERYWHERE, decides=False)
    caption_tag_dropout_rate: float = _key(NUMBER, 0.0, _EVERYWHERE, decides=False)
    token_warmup_min: int = _key(WHOLE, 1, _EVERYWHERE, decides=False)
    token_warmup_step: float = _key(NUMBER, 0, _EVERYWHERE, decides=False)
    custom_attributes: Mapping[str, Any] = _key(TABLE, MISSING, _EVERYWHERE, option=False, decides=False)

    @property
    def source(self) -> str | None:
        """Where its images come from: what sd-scripts compares to find a subset that was given twice."""
        return self.metadata_file if self.kind is DatasetKind.FINE_TUNING else self.image_dir


@dataclass(frozen=True)
class DatasetConfig:
    """One dataset, with every value that sd-scripts would use. `resolution` is (width, height), None if missing.

    Not `readable` is one of which a value that decides buckets or batches cannot be read; its default stands there.
    """

    number: int
    place: str
    kind: DatasetKind
    subsets: tuple[SubsetConfig, ...]
    readable: bool = True
    resolution: tuple[int, int] | None = _key(SIZE, None, _OF_DATASETS, allowed=SIDES)
    batch_size: int = _key(WHOLE, 1, _OF_DATASETS, allowed=ONE_OR_MORE)
    enable_bucket: bool = _key(FLAG, False, _OF_DATASETS)
    min_bucket_reso: int = _key(WHOLE, 256, _OF_DATASETS)
    max_bucket_reso: int = _key(WHOLE, 1024, _OF_DATASETS)
    bucket_reso_steps: int = _key(WHOLE, 64, _OF_DATASETS)
    bucket_no_upscale: bool = _key(FLAG, False, _OF_DATASETS)
    validation_split: float = _key(FRACTION, 0.0, _OF_DATASETS, allowed=_SHARE)
    validation_seed: int | None = _key(WHOLE, None, _OF_DATASETS)
    skip_image_resolution: tuple[int, int] | None = _key(SIZE, None, _OF_DATASETS, since="0.10.2")
    network_multiplier: float = _key(FRACTION, 1.0, _OF_DATASETS, option=False, decides=False)
    prior_loss_weight: float = _key(FRACTION, 1.0, (), kinds=_DB, decides=False)
    train_inpainting: bool = _key(FLAG, False, (), decides=False)
    debug_dataset: bool = _key(FLAG, False, (), decides=False)
    cache_latents: bool = _key(FLAG, False, (), decides=False)
    cache_latents_to_disk: bool = _key(FLAG, False, (), decides=False)
    cache_text_encoder_outputs: bool = _key(FLAG, False, (), decides=False)
    cache_text_encoder_outputs_to_disk: bool = _key(FLAG, False, (), decides=False)
    use_t5xxl_cache_only: bool = _key(FLAG, False, (), decides=False)
    weighted_captions: bool = _key(FLAG, False, (), decides=False)
    train_text_encoder: bool = _key(FLAG, False, (), decides=False)
    train_t5xxl: bool = _key(FLAG, False, (), decides=False)
    network_train_unet_only: bool = _key(FLAG, False, (), decides=False)
    network_module: str = _key(TEXT, "", (), decides=False)
    resize_interpolation: str | None = None  # as for subsets

    @property
    def caches_latents(self) -> bool:
        """Whether the trainer caches latents, in memory or on disk."""
        return self.cache_latents or self.cache_latents_to_disk

    @property
    def caches_text(self) -> bool:
        """Whether it caches outputs of text encoders."""
        return self.cache_text_encoder_outputs or self.cache_text_encoder_outputs_to_disk or self.use_t5xxl_cache_only

    @property
    def dataset_keys(self) -> DatasetKeys:
        """The part that decides the buckets.

        Raises:
            ValueError: no resolution is given.
        """
        if self.resolution is None:
            raise ValueError(f"{self.place} has no resolution")
        return DatasetKeys(**{one.name: getattr(self, one.name) for one in fields(DatasetKeys)})


_FIELDS = [f for table in (DatasetConfig, SubsetConfig) for f in fields(table) if "key" in f.metadata]

KEYS: Mapping[str, Key] = {f.name: f.metadata["key"] for f in _FIELDS}

#: The options of the trainers' command line that a config falls back to, by the names of the keys.
DEFAULTS: Mapping[str, Any] = {f.name: f.default for f in _FIELDS if KEYS[f.name].option}
_OPTIONS = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"}  # which have other names than the keys


def known_keys(level: Level, kind: DatasetKind | None, release: Release = NEWEST) -> set[str]:
    """The keys allowed in a table. `kind` says which dataset the table belongs to; None for any, as `[general]`."""
    if release.schema is not None:
        tables = {name for one in (DatasetKind if kind is None else [kind]) for name in _SCHEMAS[level, one]}
        return {key for name in tables for key in release.schema.get(name, ())}
    return {
        name
        for name, key in KEYS.items()
        if level in key.levels and kind in (None, *key.kinds) and (not key.since or release.is_since(key.since))
    }


def _schemas(level: Level, kind: DatasetKind) -> list[str]:
    """The dicts of `ConfigSanitizer` that the keys of a table come from."""
    prefix = {DatasetKind.DREAMBOOTH: "DB", DatasetKind.FINE_TUNING: "FT", DatasetKind.CONTROLNET: "CN"}[kind]
    names = ["SUBSET_ASCENDABLE_SCHEMA", "DO_SUBSET_ASCENDABLE_SCHEMA", f"{prefix}_SUBSET_ASCENDABLE_SCHEMA"]
    return [*names, f"{prefix}_SUBSET_DISTINCT_SCHEMA" if level is Level.SUBSET else "DATASET_ASCENDABLE_SCHEMA"]


_SCHEMAS = {(level, kind): _schemas(level, kind) for level in Level for kind in DatasetKind}


def required_keys(kind: DatasetKind) -> set[str]:
    """The keys that every subset of such a dataset must hold."""
    return {name for name, key in KEYS.items() if kind in key.required}


def kind_of(subsets: list[Any]) -> DatasetKind | None:
    """By which schema sd-scripts checks a dataset; None where its subsets mix two kinds."""
    if all("conditioning_data_dir" in subset for subset in subsets):
        return DatasetKind.CONTROLNET
    with_metadata = ["metadata_file" in subset for subset in subsets]
    if all(with_metadata):
        return DatasetKind.FINE_TUNING
    return None if any(with_metadata) else DatasetKind.DREAMBOOTH


def config_name(name: str) -> str:
    """How the config calls a command line option."""
    return _OPTIONS.get(name, name)


def arguments(command_line: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults with those of the command line over them; names as on the command line (`vars(namespace)` will do).

    Options that datasets do not read are left out; None counts as not given.
    """
    named = {config_name(name): value for name, value in (command_line or {}).items() if value is not None}
    out = {key: named.get(key, default) for key, default in DEFAULTS.items()}
    for key in ("resolution", "skip_image_resolution"):
        if out[key] is not None and not isinstance(out[key], tuple):
            out[key] = parse_resolution(out[key], key)
    return out
