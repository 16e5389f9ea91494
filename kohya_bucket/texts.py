"""Texts from outside: small files read whole and bounded, and names shown in one line."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kohya_bucket.errors import ConfigError, OddFileError, TooLongError
from kohya_bucket.inputs import MAX_CONFIG_BYTES, read_input

_MAX_DEPTH = 64
_WANT = "a regular file is read here"

# C0, C1, marks and overrides of writing direction, separators of lines and paragraphs, bytes that are not text.
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_HALF = re.compile("[\ud800-\udfff]")


def one_line(text: object) -> str:
    """A text for a terminal or a log, with names in it that anybody may have given: unprintable characters are escaped.

    So no file name ends a line and begins a forged one, changes colours, or turns what follows around.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), str(text))


def is_whole(text: str) -> bool:
    """Whether a text is Unicode: of one that was cut, JSON may hold half of a character."""
    return _HALF.search(text) is None


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def counted(count: int, what: str, one: str = "", many: str = "") -> str:
    """1 -> "1 image", 1200 -> "1,200 images"; with a verb, `one` or `many`, behind it: "1 image is"."""
    if count != 1:
        of_copy = what[-1:] == "y" and what[-2:-1] not in "aeiou"
        what = f"{what[:-1]}ies" if of_copy else what + ("es" if what.endswith(("ch", "s", "x")) else "s")
    verb = one if count == 1 else many
    return f"{count:,} {what}{' ' * bool(verb)}{verb}"


def uncaptioned(
    bare: Sequence[str], total: int, then: str = "an empty one is trained", kind: str = "caption", what: str = "image"
) -> str:
    """What every reader says of images, or `what` they are, without a caption of some kind; `then` is the outcome."""
    share = f"{len(bare):,} of {counted(total, what)} {'has' if len(bare) == 1 else 'have'} no {kind}"
    return f"{share}, so {then} ({some(bare)})"


def read_regular(path: str | os.PathLike[str], limit: int = MAX_CONFIG_BYTES, want: str = _WANT) -> bytes:
    """The whole of a file.

    Args:
        limit: bytes that such a file has at most.
        want: what is expected, for the error.

    Raises:
        ConfigError: a folder, a pipe, a device, or longer than the limit.
        OSError: it is missing or cannot be read.
    """
    try:
        return read_input(path, limit)
    except TooLongError as error:
        raise ConfigError(f"{os.fspath(path)} is {error.strerror}: is it the right one?") from None
    except OddFileError as error:
        raise ConfigError(f"{os.fspath(path)} is {error.strerror}, but {want}: name one") from None


def read_text(path: str | os.PathLike[str], limit: int = MAX_CONFIG_BYTES, want: str = _WANT) -> str:
    """The text of a file in UTF-8, with or without a byte order mark; each line ends with a line feed.

    Raises:
        ConfigError: as `read_regular`, or not UTF-8.
        OSError: it is missing or cannot be read.
    """
    try:
        text = read_regular(path, limit, want).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{os.fspath(path)} is not UTF-8 text ({error}): is it the right file? If so, save it as UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse_toml(text: str) -> dict[str, Any]:
    """What a TOML text holds.

    Raises:
        ValueError: it is not TOML, or nested more than 64 deep; toml's own error has the line as `lineno`.
    """
    import toml

    try:
        data = toml.loads(text)
    except (IndexError, TypeError, AttributeError, KeyError) as error:  # toml lets these through for some slips
        raise ValueError(str(error) or type(error).__name__) from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(data)
    return dict(data)


def parse_json(text: str, object_of: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """What a JSON text holds; `object_of` makes an object from its names and values, else it is a dict.

    Raises:
        ValueError: it is not JSON, with the place and what is wrong there; or it is nested more than 64 deep.
    """
    try:
        data = json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError as error:
        raise ValueError(f"line {error.lineno}, column {error.colno}: {json_mistake(text, error)}") from error
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(data)
    return data


def each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict for `parse_json`; `ValueError` for a name that stands twice in one, of which `json` takes the last."""
    made = dict(pairs)
    if len(made) < len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"{twice!r} stands twice in one object")
    return made


def json_mistake(text: str, error: json.JSONDecodeError) -> str:
    """What is wrong at the place where the parser stopped, in words for who wrote the file."""
    before, rest = text[: error.pos].rstrip(), text[error.pos :].lstrip(" ")
    if (re.match(r"[\]}]", rest) and before.endswith(",")) or re.match(r",\s*[\]}]", rest):
        return "there is a comma before the closing bracket: remove it"
    if rest.startswith("\\"):
        return "a backslash starts an escape: write Windows paths with / or with two backslashes"
    if rest[:1] in ("\n", "\t") or (rest[:1] == '"' and not re.match(r'"(\\.|[^"\\\n])*"', rest)):
        return "a text is not closed: put a double quote at its end"
    if not rest.strip():
        return "the file ends too early: a bracket is not closed" if before else "it is empty"
    for wrong, say in _NOT_JSON.items():
        if rest.startswith(wrong):
            return say
    if re.match(r"[\"\w\[{:-]", rest) and before[-1:] not in tuple(",:[{"):
        return "a comma or a colon is missing before this, or a bracket was closed too early"
    if rest[:1] in ("]", "}"):
        return "this bracket closes nothing, or a value is missing before it"
    return "text is written in double quotes" if re.match(r"\w", rest) else error.msg


_NOT_JSON = {
    "'": "text is written in double quotes",
    "#": "JSON has no comments",
    "//": "JSON has no comments",
    "True": "write true",
    "False": "write false",
    "None": "write null",
}
_TOO_DEEP = f"tables or lists are nested more than {_MAX_DEPTH} deep"


def _check_depth(data: Any) -> None:
    """Whatever shows or compares such a value later needs a frame for each level."""
    level = [data]
    for _ in range(_MAX_DEPTH + 1):
        if not (level := [value for value in level if isinstance(value, (dict, list))]):
            return
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    raise ValueError(_TOO_DEEP)
