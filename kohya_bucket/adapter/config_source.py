"""Reading the config file: TOML or JSON, with the line of each key and help for what people get wrong in TOML."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.texts import MAX_CONFIG_BYTES, parse_json, parse_toml, read_regular

__all__ = ["Source", "load_source"]

Place = tuple[str | int, ...]

_HEADER = re.compile(r"^\s*(\[\[?)\s*([A-Za-z0-9_.\-](?:[A-Za-z0-9_.\- ]*[A-Za-z0-9_.\-])?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"^\s*(?:\"([^\"]+)\"|'([^']+)'|([A-Za-z0-9_\-]+))\s*=")
_WINDOWS_PATH = re.compile(r"\"(?:[A-Za-z]:|\\)\\?[^\"]*\"")


@dataclass(frozen=True)
class Source:
    """A config file's content.

    Attributes:
        path: the file; None for a config made from command line arguments.
        data: its tables.
        lines: the line number of each key and table of a TOML file, by its place, e.g. `("datasets", 0, "resolution")`.
        text: the file's text.
    """

    path: Path | None
    data: dict[str, Any]
    lines: Mapping[Place, int] = field(default_factory=dict)
    text: str = ""

    def line_of(self, *place: str | int) -> str:
        """`line 7, ` or nothing where the line is not known."""
        line = self.lines.get(place)
        return f"line {line}, " if line else ""


def load_source(path: str | os.PathLike[str], trainer: str = "sd-scripts") -> Source:
    """Read a dataset config, `.toml` or `.json`.

    Args:
        trainer: whose config it is, for messages.

    Raises:
        ConfigError: no such file, another suffix, not UTF-8, or not parsable; with the line where it is known.
    """
    file = Path(path)
    if file.is_dir() or not file.exists():
        what, more = ("is a folder", _for_folder(file)) if file.is_dir() else ("does not exist", "")
        raise ConfigError(f"the dataset config {str(file)!r} {what}: give the path of a .toml or .json file{more}")
    suffix = file.suffix.lower()
    if suffix not in (".toml", ".json"):
        raise ConfigError(f"{file}: {trainer} reads dataset configs ending in .toml or .json, not {suffix or 'none'!r}")
    text = _decode(file, trainer)
    data = _parse_json(file, text) if suffix == ".json" else _parse_toml(file, text)
    return Source(file, data, {} if suffix == ".json" else _line_numbers(text), text)


def _for_folder(folder: Path) -> str:
    """What to call for a folder of images, by what is in it."""
    if any(re.match(r"\d+_", one.name) and one.is_dir() for one in folder.iterdir()):
        return f", or `kohya-bucket plan --train-data-dir {folder}`"
    return f", or `kohya-bucket analyze {folder}` for its images"


def _decode(file: Path, trainer: str) -> str:
    raw = read_regular(file, MAX_CONFIG_BYTES)
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
    unclosed = _unclosed_list(text)
    if unclosed:
        # The toml library drops the last character of such a list without a word: 512 becomes 51.
        raise ConfigError(f"{file}, line {unclosed}: a list is opened with [ and never closed: add the ]")
    try:
        return parse_toml(text)
    except ValueError as error:
        line = getattr(error, "lineno", None)
        what = str(getattr(error, "msg", "") or error or type(error).__name__)
        place = f"{file}, line {line}" if line else str(file)
        hint = _toml_hint(what, _line(text, line))
        raise ConfigError(f"{place}: {what}{hint}") from error


def _line(text: str, number: int | None) -> str:
    lines = text.split("\n")
    return lines[number - 1] if number and number <= len(lines) else ""


def _toml_hint(what: str, line: str) -> str:
    if "escape" in what.lower() or _WINDOWS_PATH.search(line):
        path = _WINDOWS_PATH.search(line)
        shown = f": {path.group()[1:-1]!r}".replace("\\\\", "\\") if path else ""
        return f". In double quotes a backslash starts an escape; put Windows paths in single quotes{shown}"
    if "boolean" in what.lower() or re.search(r"=\s*(True|False)\b", line):
        return ". Booleans are written true and false"
    if "homogeneous" in what.lower():
        return ". A list holds values of one type: [2.0, 4.0], not [2, 4.0]"
    if re.search(r"=\s*\d+\s*,\s*\d+", line):
        return ". Two numbers are written in brackets: [512, 768]"
    if re.search(r"=\s*[A-Za-z/~.\\]", line) and '"' not in line and "'" not in line:
        return ". Text is written in quotes: key = 'text'"
    return ""


def _strip_strings(line: str) -> str:
    """The line without quoted strings and comments."""
    return re.sub(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|#.*", "", line)


def _unclosed_list(text: str) -> int | None:
    """The line of a list without its closing bracket, or None."""
    if '"""' in text or "'''" in text:
        return None
    opened, depth = 0, 0
    for number, line in enumerate(text.split("\n"), 1):
        bare = _strip_strings(line)
        if depth and (_HEADER.match(line) or _KEY.match(line)):
            return opened
        if not depth:
            bare = bare.split("=", 1)[1] if "=" in bare else ""
            opened = number
        depth = max(0, depth + bare.count("[") - bare.count("]"))
    return opened if depth else None


def _line_numbers(text: str) -> dict[Place, int]:
    """Where each table and key stands. An approximation for messages: it reads headers and `key =` only."""
    lines: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    place: Place = ()
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
