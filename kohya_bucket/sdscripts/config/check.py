"""Checking a config's tables against the schema: what sd-scripts would refuse, all of it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kohya_bucket.adapter.config_source import Place, Source
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.sdscripts.config.release import NEWEST, Release
from kohya_bucket.sdscripts.config.schema import (
    ALL,
    KEYS,
    Kind,
    Level,
    Supports,
    Type,
    kind_of,
    known_keys,
    required_keys,
)
from kohya_bucket.sdscripts.config.suggest import levels_of, nearest_key, remedy_for

__all__ = ["REFUSALS", "CheckedConfig", "CheckedDataset", "check_config"]

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
