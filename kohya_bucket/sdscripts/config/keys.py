"""Which keys a dataset config may hold, at which level, of which type.

Source: the schemas that `ConfigSanitizer` of sd-scripts builds (library/config_util.py). They depend on the
kind of dataset and on what the trainer supports; a few keys came with later versions.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_bucket.errors import ConfigError

__all__ = [
    "ALL",
    "DEFAULTS",
    "KEYS",
    "NEWEST",
    "Change",
    "Key",
    "Kind",
    "Level",
    "Release",
    "Supports",
    "Type",
    "arguments",
    "config_name",
    "kind_of",
    "known_keys",
    "parse_resolution",
    "required_keys",
]


# What versions of sd-scripts read differently in configs, metadata and captions, and which of it a checkout reads.


_FILES = ("config_util.py", "train_util.py", "finetuning_dataset.py")


class Change(enum.Enum):
    """One change: the version that brought it, and words that no earlier `library/` holds.

    Forks took over some changes and not others, so a checkout is judged by its words and not by a version.
    """

    # the keys validation_split, validation_seed, custom_attributes, resize_interpolation
    VALIDATION = ("0.10", "validation_split")
    # metadata lists images with their sizes, as .json or .jsonl; before, it could prescribe buckets
    IMAGE_LISTS = ("0.10", 'image_path"]')
    # the key skip_image_resolution; control images to spare do not stop it; a metadata_cache.json keeps captions apart
    SKIPPING = ("0.10.2", "skip_image_resolution")
    # metadata keys without extension are looked up; width and height in .jsonl
    STEMS = ("0.10.6", '"width" in line_md')
    # with enable_wildcard, the tags of an image without caption are trained
    TAGS_ALONE = ("0.11.2", "caption_lines")

    @property
    def since(self) -> str:
        """The version that brought it."""
        return self.value[0]


@dataclass(frozen=True)
class Release:
    """A version of sd-scripts, by the changes that are in it; by default all.

    Attributes:
        changes: what it has; `change in release` asks.
        name: what messages call it.
    """

    changes: frozenset[Change] = frozenset(Change)
    name: str = field(default="the newest", compare=False)

    def __contains__(self, change: Change) -> bool:
        return change in self.changes

    @classmethod
    def of(cls, version: str) -> Release:
        """That of a version such as `v0.9.1`, or the last of a series such as `0.10`; else the newest."""
        numbers = _numbers(version)
        if not numbers:
            return NEWEST
        changes = (change for change in Change if _numbers(change.since)[: len(numbers)] <= numbers)
        return cls(frozenset(changes), version)

    @classmethod
    def in_checkout(cls, folder: Path) -> Release:
        """That of a checkout, by the source in its `library` folder."""
        text = ""
        for name in _FILES:
            file = folder / "library" / name
            text += file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
        return cls(frozenset(change for change in Change if change.value[1] in text), str(folder))


NEWEST = Release()


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, match[1].split("."))) if match else ()


class Kind(enum.Enum):
    """The three kinds of datasets."""

    DREAMBOOTH = "dreambooth"
    FINE_TUNING = "fine-tuning"
    CONTROLNET = "controlnet"


class Level(enum.Enum):
    """The tables of a config."""

    TOP = "the top level"
    GENERAL = "[general]"
    DATASET = "[[datasets]]"
    SUBSET = "[[datasets.subsets]]"


@dataclass(frozen=True)
class Supports:
    """What a trainer reads.

    `train_network` reads DreamBooth and fine-tuning datasets, and ControlNet pairs with `--masked_loss`; the
    ControlNet trainers read pairs only; textual inversion has no caption dropout.
    """

    dreambooth: bool = True
    finetuning: bool = True
    controlnet: bool = True
    dropout: bool = True


ALL = Supports()


class Type(enum.Enum):
    """What a value must be. As in sd-scripts, `true` and `false` pass as whole numbers."""

    BOOL = "true or false"
    INT = "a whole number"
    FLOAT = "a decimal number"
    NUMBER = "a number"
    STR = "a string"
    TABLE = "a table"
    SIZE = "a whole number or two of them, [width, height]"
    TWO_FLOATS = "two decimal numbers, [smallest, largest]"

    def accepts(self, value: Any) -> bool:
        """Whether sd-scripts accepts `value`."""
        if self is Type.SIZE:
            return isinstance(value, int) or _pair_of(int, value)
        if self is Type.TWO_FLOATS:
            return _pair_of(float, value)
        return isinstance(value, _PYTHON_TYPES[self])

    def convert(self, value: Any) -> Any:
        """The value as sd-scripts uses it."""
        if self is Type.SIZE and isinstance(value, int):
            return (value, value)
        return tuple(value) if self in (Type.SIZE, Type.TWO_FLOATS) else value


_PYTHON_TYPES: dict[Type, tuple[type, ...]] = {
    Type.BOOL: (bool,),
    Type.INT: (int,),
    Type.FLOAT: (float,),
    Type.NUMBER: (int, float),
    Type.STR: (str,),
    Type.TABLE: (dict,),
}


def _pair_of(kind: type, value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(v, kind) for v in value)


class _Group(enum.Enum):
    DATASET = "dataset"  # dataset and general
    SUBSET = "subset"  # subset, dataset and general, of every kind
    DROPOUT = "dropout"  # as SUBSET, where the trainer has caption dropout
    CAPTIONED = "captioned"  # as SUBSET, for DreamBooth and ControlNet
    DREAMBOOTH = "dreambooth"  # as SUBSET, for DreamBooth
    OWN = "own"  # the subset alone, for the kinds named


@dataclass(frozen=True)
class Key:
    """One key: its type, where it is known, and the change that brought it (None: it was always there)."""

    name: str
    type: Type
    group: _Group
    kinds: frozenset[Kind] = frozenset(Kind)
    required: frozenset[Kind] = frozenset()
    since: Change | None = None


_DB, _FT, _CN = Kind.DREAMBOOTH, Kind.FINE_TUNING, Kind.CONTROLNET


def _keys() -> dict[str, Key]:
    new = Change.VALIDATION
    out = [
        *(Key(n, t, _Group.DATASET) for n, t in {
            "batch_size": Type.INT, "bucket_no_upscale": Type.BOOL, "bucket_reso_steps": Type.INT,
            "enable_bucket": Type.BOOL, "max_bucket_reso": Type.INT, "min_bucket_reso": Type.INT,
            "resolution": Type.SIZE, "network_multiplier": Type.FLOAT,
        }.items()),
        Key("validation_seed", Type.INT, _Group.DATASET, since=new),
        Key("validation_split", Type.FLOAT, _Group.DATASET, since=new),
        Key("skip_image_resolution", Type.SIZE, _Group.DATASET, since=Change.SKIPPING),
        *(Key(n, t, _Group.SUBSET) for n, t in {
            "color_aug": Type.BOOL, "face_crop_aug_range": Type.TWO_FLOATS, "flip_aug": Type.BOOL,
            "num_repeats": Type.INT, "random_crop": Type.BOOL, "shuffle_caption": Type.BOOL,
            "keep_tokens": Type.INT, "keep_tokens_separator": Type.STR, "secondary_separator": Type.STR,
            "caption_separator": Type.STR, "enable_wildcard": Type.BOOL, "token_warmup_min": Type.INT,
            "token_warmup_step": Type.NUMBER, "caption_prefix": Type.STR, "caption_suffix": Type.STR,
        }.items()),
        Key("custom_attributes", Type.TABLE, _Group.SUBSET, since=new),
        Key("resize_interpolation", Type.STR, _Group.SUBSET, since=new),
        Key("caption_dropout_every_n_epochs", Type.INT, _Group.DROPOUT),
        Key("caption_dropout_rate", Type.NUMBER, _Group.DROPOUT),
        Key("caption_tag_dropout_rate", Type.NUMBER, _Group.DROPOUT),
        Key("caption_extension", Type.STR, _Group.CAPTIONED, frozenset({_DB, _CN})),
        Key("cache_info", Type.BOOL, _Group.CAPTIONED, frozenset({_DB, _CN})),
        Key("class_tokens", Type.STR, _Group.DREAMBOOTH, frozenset({_DB})),
        Key("image_dir", Type.STR, _Group.OWN, required=frozenset({_DB, _CN})),
        Key("is_reg", Type.BOOL, _Group.OWN, frozenset({_DB})),
        Key("alpha_mask", Type.BOOL, _Group.OWN, frozenset({_DB, _FT})),
        Key("metadata_file", Type.STR, _Group.OWN, frozenset({_FT}), required=frozenset({_FT})),
        Key("conditioning_data_dir", Type.STR, _Group.OWN, frozenset({_CN}), required=frozenset({_CN})),
    ]  # fmt: skip
    return {key.name: key for key in out}


KEYS: Mapping[str, Key] = _keys()


def known_keys(level: Level, kind: Kind | None, supports: Supports = ALL, release: Release = NEWEST) -> set[str]:
    """The keys allowed in a table. `kind` says which dataset the table belongs to; None for `[general]`."""
    out = set()
    for key in KEYS.values():
        if (key.since and key.since not in release) or (key.group is _Group.DROPOUT and not supports.dropout):
            continue
        if level is Level.GENERAL:
            known = (
                key.group in (_Group.DATASET, _Group.SUBSET, _Group.DROPOUT)
                or (key.group is _Group.CAPTIONED and (supports.dreambooth or supports.controlnet))
                or (key.group is _Group.DREAMBOOTH and supports.dreambooth)
            )
        elif level is Level.DATASET:
            known = key.group is not _Group.OWN and kind in key.kinds
        elif level is Level.SUBSET:
            known = key.group is not _Group.DATASET and kind in key.kinds
        else:
            known = False
        if known:
            out.add(key.name)
    return out


def required_keys(kind: Kind) -> set[str]:
    """The keys that every subset of such a dataset must hold."""
    return {key.name for key in KEYS.values() if kind in key.required}


def kind_of(subsets: list[Any], supports: Supports = ALL) -> Kind | None:
    """By which schema sd-scripts checks a dataset; None where its subsets mix two kinds."""
    if not (supports.dreambooth and supports.finetuning):
        if supports.finetuning:
            return Kind.FINE_TUNING
        return Kind.CONTROLNET if supports.controlnet else Kind.DREAMBOOTH
    if supports.controlnet and all("conditioning_data_dir" in subset for subset in subsets):
        return Kind.CONTROLNET
    with_metadata = ["metadata_file" in subset for subset in subsets]
    if all(with_metadata):
        return Kind.FINE_TUNING
    return None if any(with_metadata) else Kind.DREAMBOOTH


# The trainer's command line options that a dataset config falls back to, with their defaults.
#
# Source: sd-scripts' `add_dataset_arguments` and `add_training_arguments`. An option counts only where the config is
# silent: subset > dataset > general > command line > default.


_OTHER_NAMES = {"train_batch_size": "batch_size", "dataset_repeats": "num_repeats"}

DEFAULTS: Mapping[str, Any] = {
    "alpha_mask": False,
    "batch_size": 1,
    "bucket_no_upscale": False,
    "bucket_reso_steps": 64,
    "cache_info": False,
    "caption_dropout_every_n_epochs": 0,
    "caption_dropout_rate": 0.0,
    "caption_extension": ".caption",
    "caption_prefix": None,
    "caption_separator": ",",
    "caption_suffix": None,
    "caption_tag_dropout_rate": 0.0,
    "color_aug": False,
    "debug_dataset": False,
    "enable_bucket": False,
    "enable_wildcard": False,
    "face_crop_aug_range": None,
    "flip_aug": False,
    "keep_tokens": 0,
    "keep_tokens_separator": "",
    "max_bucket_reso": 1024,
    "min_bucket_reso": 256,
    "num_repeats": 1,
    "prior_loss_weight": 1.0,
    "random_crop": False,
    "resize_interpolation": None,
    "resolution": None,
    "secondary_separator": None,
    "shuffle_caption": False,
    "skip_image_resolution": None,
    "token_warmup_min": 1,
    "token_warmup_step": 0,
    "train_inpainting": False,
    "validation_seed": None,
    "validation_split": 0.0,
}


def config_name(name: str) -> str:
    """How the config calls a command line option."""
    return _OTHER_NAMES.get(name, name)


def arguments(given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults with the given options over them; names as on the command line (`vars(namespace)` will do).

    Options that datasets do not read are left out; None counts as not given.
    """
    out = dict(DEFAULTS)
    for name, value in (given or {}).items():
        key = config_name(name)
        if value is not None and key in out:
            out[key] = value
    for key in ("resolution", "skip_image_resolution"):
        if isinstance(out[key], (str, int)):
            out[key] = parse_resolution(out[key], key)
    return out


def parse_resolution(text: str | int, name: str = "resolution") -> tuple[int, int]:
    """`512`, `512,768` or `512x768` as (width, height); sd-scripts has the first two.

    `name` is the option's, for messages.

    Raises:
        ConfigError: anything else.
    """
    parts = re.split("[,x×*]", str(text).lower())
    try:
        sides = [int(part) for part in parts]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise ConfigError(f"{name} is {text!r}, but must be a size like 512 or a width and height like 512,768")
    return sides[0], sides[-1]
