"""Inheritance: which value each dataset and subset ends up with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kohya_bucket.sdscripts.config.check import CheckedConfig, CheckedDataset
from kohya_bucket.sdscripts.config.model import DatasetConfig, SubsetConfig
from kohya_bucket.sdscripts.config.schema import Kind

__all__ = ["resolve"]

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
