"""Reading a dataset config: TOML or JSON, with the line of each key, and its tables, strictly, by the trainer's keys.

Trainers check values by `isinstance`: true is a whole number to them, and 30 no fraction.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_bucket.checks import path_meant, quoted
from kohya_bucket.errors import ConfigError
from kohya_bucket.extras import pip_install
from kohya_bucket.texts import parse_json, parse_toml, read_regular, read_text
from kohya_bucket.trainers.door.findings import Findings

TablePath = tuple[str | int, ...]

_ENDINGS = (".toml", ".json")
YAML = (".yaml", ".yml")
_MOST_PARTS = 1_000_000

_HEADER = re.compile(r"^\s*(\[\[?)\s*([A-Za-z0-9_.\-](?:[A-Za-z0-9_.\- ]*[A-Za-z0-9_.\-])?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*(?:\"([^\"]+)\"|'([^']+)'|([A-Za-z0-9_\-]+))\s*=")
_WINDOWS_PATH = re.compile(r"\"(?:[A-Za-z]:|\\)\\?[^\"]*\"")


@dataclass(frozen=True)
class ConfigSource:
    """A config file's content.

    Attributes:
        path: the file; None for a config made from command line arguments.
        data: its tables.
        lines: the line number of each key and table of a TOML file, by its place, e.g. `("datasets", 0, "resolution")`.
    """

    path: Path | None
    data: dict[str, Any]
    lines: Mapping[TablePath, int] = field(default_factory=dict)

    def line_of(self, *place: str | int) -> str:
        """`line 7, ` or nothing where the line is not known."""
        line = self.lines.get(place)
        return f"line {line}, " if line else ""


def content_of(path: Path) -> Any:
    """What a TOML, JSON or YAML file holds; None where it holds none of these."""
    try:
        text, ending = read_text(path), path.suffix.lower()
        return parse_yaml(text) if ending in YAML else parse_json(text) if ending == ".json" else parse_toml(text)
    except (OSError, ValueError):
        return None


def parse_yaml(text: str) -> Any:
    """What a YAML text holds, as `yaml.safe_load` reads it. ValueError for what is not YAML, or has no end."""
    try:
        import yaml
    except ModuleNotFoundError as missing:
        raise ConfigError(f"a YAML file is read by PyYAML, which is not installed: {pip_install('yaml')}") from missing
    try:
        data = yaml.safe_load(text)
        parts = _parts(data, {})
    except Exception as error:  # a scalar that does not fit its tag raises whatever PyYAML ran into
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{where}{getattr(error, 'problem', None) or 'it is not YAML'}") from error
    if parts > _MOST_PARTS:
        raise ValueError("a part of it contains itself, or others over and over: write it out without & and *")
    return data


def _parts(value: Any, parts_of: dict[int, int]) -> int:
    """How many parts a value has where each alias is written out; more than `_MOST_PARTS` if it contains itself."""
    if not isinstance(value, (dict, list)):
        str(value)  # ValueError for a number with more digits than Python shows
        return 1
    if id(value) not in parts_of:
        parts_of[id(value)] = _MOST_PARTS + 1
        inner = value.values() if isinstance(value, dict) else value
        parts_of[id(value)] = 1 + sum(_parts(one, parts_of) for one in inner)
    return parts_of[id(value)]


def real_path(path: str) -> str:
    """Without links; a name that no file can have stays as it is."""
    try:
        return os.path.realpath(path)
    except ValueError:
        return path


def load_source(path: str | os.PathLike[str], trainer: str) -> ConfigSource:
    """Read a dataset config, `.toml` or `.json`.

    Args:
        trainer: whose config it is, for messages.

    Raises:
        ConfigError: no such file, another suffix, not UTF-8, or not parsable; with the line where it is known.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        what = f"does not exist: {path_meant(file, _ENDINGS)}"
        if file.is_dir():
            what = f'is a folder: give the path of a .toml or .json file, or `kohya-bucket plan "{file}"`'
        raise ConfigError(f"the dataset config {quoted(file)} {what}")
    suffix = file.suffix.lower()
    if suffix not in _ENDINGS:
        raise ConfigError(f"{file}: {trainer} reads dataset configs ending in .toml or .json, not {suffix or 'none'!r}")
    text = _decode(file, trainer)
    data = _parse_json(file, text) if suffix == ".json" else _parse_toml(file, text)
    return ConfigSource(file, data, {} if suffix == ".json" else _line_numbers(text))


def _decode(file: Path, trainer: str) -> str:
    raw = read_regular(file)
    if raw.startswith(b"\xef\xbb\xbf"):
        raise ConfigError(
            f"{file} starts with a byte order mark, which makes {trainer} stop: save it as 'UTF-8', not 'UTF-8 "
            "with BOM'"
        )
    try:
        # As open() does it, so that line ends are "\n" on every system.
        return raw.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ConfigError(
            f"{file}, line {line}: not UTF-8 (byte 0x{raw[error.start]:02x}): save it as UTF-8"
        ) from error


def _parse_json(file: Path, text: str) -> dict[str, Any]:
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file} must hold an object with 'general' and 'datasets', not {type(data).__name__}")
    return data


def _parse_toml(file: Path, text: str) -> dict[str, Any]:
    if unclosed := _unclosed_list(text):
        # The toml library drops the last character of such a list without a word: 512 becomes 51.
        raise ConfigError(f"{file}, line {unclosed}: a list is opened with [ and never closed: add the ]")
    try:
        return parse_toml(text)
    except ValueError as error:
        line = getattr(error, "lineno", None)
        what = str(getattr(error, "msg", "") or error or type(error).__name__)
        place = f"{file}, line {line}" if line else str(file)
        lines = dict(enumerate(text.split("\n"), 1))
        raise ConfigError(f"{place}: {what}{_toml_hint(what, lines.get(line or 0, ''))}") from error


_MIXED_NUMBERS = re.compile(r"\[\s*(?:\d+|\"\d+\"|'\d+')(?:\s*,\s*(?:\d+|\"\d+\"|'\d+'))+\s*\]")


def _toml_hint(what: str, line: str) -> str:
    if (path := _WINDOWS_PATH.search(line)) or "escape" in what.lower():
        shown = f": {path.group()[1:-1]!r}".replace("\\\\", "\\") if path else ""
        return f". In double quotes a backslash starts an escape; put Windows paths in single quotes{shown}"
    if "boolean" in what.lower() or re.search(r"=\s*(True|False)\b", line):
        return ". Booleans are written true and false"
    if "homogeneous" in what.lower():
        mixed = _MIXED_NUMBERS.search(line)
        example = f"{mixed.group().replace(chr(34), '').replace(chr(39), '')}" if mixed else "[2.0, 4.0]"
        return f". A list holds values of one type: {example}, not {mixed.group() if mixed else '[2, 4.0]'}"
    if re.search(r"=\s*\[?\s*\d+\s*[, ]\s*\d+", line):
        return ". Two numbers are written in brackets: [512, 768]"
    if re.search(r"=\s*[A-Za-z/~.\\]", line) and '"' not in line and "'" not in line:
        return ". Text is written in quotes: key = 'text'"
    return ""


def _unclosed_list(text: str) -> int | None:
    """The line of a list without its closing bracket, or None."""
    if '"""' in text or "'''" in text:
        return None
    opened, depth = 0, 0
    for number, line in enumerate(text.split("\n"), 1):
        bare = re.sub(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|#.*", "", line)  # without quoted strings and comments
        if depth and (_HEADER.match(line) or _KEY.match(line)):
            return opened
        if not depth:
            bare = bare.split("=", 1)[1] if "=" in bare else ""
            opened = number
        depth = max(0, depth + bare.count("[") - bare.count("]"))
    return opened if depth else None


def _line_numbers(text: str) -> dict[TablePath, int]:
    """Where each table and key stands. An approximation for messages: it reads headers and `key =` only."""
    lines: dict[TablePath, int] = {}
    counts: dict[TablePath, int] = {}
    place: TablePath = ()
    for number, line in enumerate(text.split("\n"), 1):
        header = _HEADER.match(line)
        if header:
            place = ()
            names = [part.strip() for part in header.group(2).split(".")]
            for depth, name in enumerate(names):
                here = (*place, name)
                if depth == len(names) - 1 and header.group(1) == "[[":
                    counts[here] = counts.get(here, -1) + 1
                    lines.setdefault(here, number)
                place = (*here, counts[here]) if here in counts else here
            lines.setdefault(place, number)
            continue
        key = _KEY.match(line)
        if key:
            name = key.group(1) or key.group(2) or key.group(3)
            lines.setdefault((*place, name), number)
    return lines


@dataclass(frozen=True)
class Type:
    """A type of values, or a range within one.

    Attributes:
        text: what must be given, for messages.
        fits: whether a trainer takes a value.
        taken: what it makes of the value.
    """

    text: str
    fits: Callable[[Any], bool]
    taken: Callable[[Any], Any] = lambda value: value

    def meant(self, value: Any) -> Any:
        """The value of this type that another looks like; None if it looks like none."""
        return next(filter(self.fits, _guesses(value)), None)


LARGEST = 1_000_000  # no side, step, batch size or number of frames is above


def _guesses(value: Any) -> Iterator[Any]:
    """What someone may have meant who wrote a value of a wrong type."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            parts = json.loads(f"[{value.strip().lower().replace('x', ',')}]")
            yield parts
            if len(parts) == 1:
                yield parts[0]
                yield from _guesses(parts[0])
    elif isinstance(value, list):
        if all(isinstance(one, (int, float)) and abs(one) < 1 << 53 for one in value):
            yield [float(one) for one in value]
        yield from value[:1]
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST:
        yield float(value)
        yield from (kind(value) for kind in (int, bool) if kind(value) == value)


def _of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


def _pair_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, (list, tuple)) and len(value) == 2 and all(map(_of(kind), value))


FLAG = Type("true or false", _of(bool))
WHOLE = Type("a whole number", _of(int))
FRACTION = Type("a number with a decimal point, e.g. 30.0", _of(float))
NUMBER = Type("a number", _of(int, float))
TEXT = Type("a text in quotes", _of(str))
TABLE = Type("a table", _of(dict))
ANYTHING = Type("anything", _of(object))
SIZE = Type("a whole number or two of them, [width, height]", lambda value: _of(int)(value) or _pair_of(int)(value),
            lambda value: (value, value) if isinstance(value, int) else tuple(value))  # fmt: skip
WHOLES = Type("a list of whole numbers, e.g. [1, 25, 45]",
              lambda value: isinstance(value, list) and all(map(_of(int), value)), tuple)  # fmt: skip
FRACTIONS = Type("two numbers with decimal points, [smallest, largest]", _pair_of(float), tuple)


# Ranges: values with which a training can work, of those of the type.
ONE_OR_MORE = Type("1 or more", lambda value: value >= 1)
MOST_REPEATS = 100_000  # 20 images three million times took more than a minute and 4 GB, for one epoch
MOST_STRANGE = 100
"""Unknown keys for which a known one is looked up that was meant: each takes a millisecond."""
SIDES = Type(f"sides of 1 to {LARGEST:,} pixels", lambda value: min(value) >= 1 and max(value) <= LARGEST)


def parse_resolution(text: Any, name: str = "resolution") -> tuple[int, int]:
    """`512`, `512,768` or `512x768` as (width, height).

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


def check_range(name: str, value: Any, allowed: Type, place: str, findings: Findings) -> None:
    """Report a value of the right type with which a trainer cannot train, or not as meant; None counts as not given."""
    if value is not None and not allowed.fits(value):
        shown = list(value) if isinstance(value, tuple) else value
        findings.error(name.replace("_", "-"), place, f"{name} is {shown}, but must be {allowed.text}")


def check_repeats(repeats: int, place: str, findings: Findings) -> None:
    """Report more repeats than a plan can hold."""
    if repeats > MOST_REPEATS:
        message = f"num_repeats is {repeats:,}, but no more than {MOST_REPEATS:,} can be planned"
        findings.error("num-repeats", place, message, "lower it")


def read_table(
    table: Any, types: Mapping[str, Type], at: TablePath, name: str, source: ConfigSource, findings: Findings,
    unknown: Callable[[str], tuple[str, str, str]],
) -> dict[str, Any]:  # fmt: skip
    """The keys of one table that a trainer takes, with their values as it takes them; the others are reported.

    A misspelt key and a value of a wrong type are reported too, and taken as what they were evidently meant to be:
    `bach_size = "2"` is `batch_size = 2`.

    Args:
        at: where it stands.
        name: what messages call it.
        unknown: code, message and remedy for a key that is not known.
    """
    if not isinstance(table, Mapping):
        place = (source.line_of(*at) + name).rstrip(", ")
        findings.error("not-a-table", place, f"{table!r} is not a table", "write [general] or [[datasets]]")
        return {}
    values, strange = {}, 0
    for key, value in table.items():
        strange += key not in types
        if key not in types and strange > MOST_STRANGE:
            continue
        place = f"{source.line_of(*at, key)}{name}"
        if key not in types:
            code, message, remedy = unknown(str(key))
            meant = near_key(str(key), types) if code == "unknown-key" else None
            usable = meant is not None and meant not in table and meant not in values
            remedy += " It is read as that here" if usable else " (left out here)"
            findings.error(code, place, message, remedy, (str(key),))
            if not usable:
                continue
            key = meant
        wanted = types[key]
        if not wanted.fits(value):
            meant = wanted.meant(value)
            message = f"{key} is {value!r}, but must be {wanted.text}"
            remedy = "" if meant is None else f"write {key} = {json.dumps(meant)}"
            findings.error("wrong-type", place, message, remedy, (key,))
            if meant is None:
                continue
            value = meant
        elif isinstance(value, bool) and wanted not in (FLAG, ANYTHING):
            message = f"{key} is {str(value).lower()}, which the trainer reads as {int(value)}"
            findings.warning("bool-as-number", place, message, "write a number", (key,))
            value = int(value)
        values[key] = wanted.taken(value)
    if strange > MOST_STRANGE:
        message = f"{strange - MOST_STRANGE:,} more keys are not known either"
        findings.error("unknown-keys", f"{source.line_of(*at)}{name}", message, "remove them (left out here)")
    return values


def unknown_key(
    key: str, here: str, tables: Mapping[str, Collection[str]], elsewhere: Mapping[str, str] | None = None,
    hint: str = "",
) -> tuple[str, str, str]:  # fmt: skip
    """Code, message and remedy for a key that does not belong into the table `here`.

    Args:
        tables: the keys of all tables, by name.
        elsewhere: what keys are called that mean the same in other programs.
        hint: what to do besides if the key resembles none.
    """
    homes = " or ".join(name for name, keys in tables.items() if key in keys)
    if homes:
        return "misplaced-key", f"{key!r} does not belong in {here}", f"move it to {homes}"
    what, near = f"there is no key {key!r}", near_key(key, tables[here], elsewhere)
    if near:
        return "unknown-key", what, f"did you mean {near!r}?"
    near = near_key(key, {name for keys in tables.values() for name in keys}, elsewhere)
    if near:
        homes = " or ".join(name for name, keys in tables.items() if near in keys)
        return "unknown-key", what, f"did you mean {near!r}? It belongs in {homes}"
    return "unknown-key", what, f"remove it; {here} knows {', '.join(sorted(tables[here]))}{hint}"


def no_datasets(path: object, findings: Findings) -> ConfigError:
    """The error for a config without datasets, with the first key that may have been meant to be one of theirs."""
    strange = [one for one in findings if one.code in ("unknown-key", "misplaced-key")]
    meant = f": {strange[0].message}: {strange[0].remedy}" if strange else ""
    return ConfigError(f"{path}: there is no [[datasets]] in it, so there is nothing to train{meant}")


def near_key(key: str, candidates: Collection[str], elsewhere: Mapping[str, str] | None = None) -> str | None:
    """The known key that another one was probably meant to be; None if none resembles it."""
    plain = key.strip().lower().replace("-", "_").replace(" ", "_")
    plain = (elsewhere or {}).get(plain, plain)
    return next(iter(difflib.get_close_matches(plain, sorted(candidates), 1, 0.7)), None)
