"""Focus rectangles from files: one JSON Lines or Parquet file of all images, or a small file beside each.

A row is `{"image": "dogs/a.jpg", "focus": [left, top, right, bottom]}`, in shares of the picture, or `[x, y]` for a
point; images are named relative to the folder of the file. Beside `a.jpg` can be `a.focus.json` with such a row or only
its list, or SimpleTuner's `a.bbox`, a list of `{"label": …, "bbox": [x1, y1, x2, y2]}` in shares, which counts as the
smallest rectangle around all boxes. `buckets/focus.py` says what a rectangle means.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.focus import BESIDE, NO_FOCUS
from kohya_bucket.buckets.sizes import FloatArray
from kohya_bucket.checks import path_meant, quoted
from kohya_bucket.errors import ConfigError, UnreadableError, as_damage, reading
from kohya_bucket.images.arrow_files import bounded_table
from kohya_bucket.images.formats import in_short
from kohya_bucket.images.listing import are_there, file_key
from kohya_bucket.images.remote import is_url
from kohya_bucket.inputs import MAX_TABLE_BYTES, read_input
from kohya_bucket.texts import counted, one_line, parse_json, read_text, some

_LINES = 4096  # that are parsed at once
FOCUS_EXTENSIONS = _OWN, _SIMPLETUNER = ".focus.json", ".bbox"
_FORM = "[left, top, right, bottom] or [x, y], in shares of the picture from 0 to 1"
_ODD_NAMES = ("/.", "//", "\\", ":")  # parts of names that may need normalising

Row = tuple[str, tuple[float, ...]]


def read_focus(where: str, paths: Sequence[str]) -> tuple[FloatArray, list[str]]:
    """The focus of each image: [N, 4] shares, NaN where there is none; and names in the file whose images are missing.

    Args:
        where: a JSON Lines (`.jsonl`) or Parquet file; or `beside` for files beside the images.
        paths: [N] image files.

    Raises:
        ConfigError: a file that cannot be read, or a row that is not a rectangle, with file, line and value.
        UnreadableError: the folder of an image cannot be listed now.
    """
    try:
        if where == BESIDE:
            return _beside(paths), []
        status = os.stat(where)
        if not stat.S_ISREG(status.st_mode):
            raise OSError("it is not a file")
        folder, names, rectangles, keys = _table(os.path.abspath(where), status.st_size, status.st_mtime_ns)
    except (ConfigError, UnreadableError):
        raise
    except (OSError, ValueError) as error:  # ValueError: an impossible file name
        at = getattr(error, "filename", None) if where == BESIDE else None
        why = f"{at}: {in_short(error)}" if at else in_short(error)
        raise ConfigError(
            f"focus is {quoted(where)}, which cannot be read ({why}): name a .jsonl or .parquet file, or {BESIDE!r} "
            f"for files beside the images; {path_meant(where)}"
        ) from None
    image_keys = [_inside(path if is_url(path) else file_key(path), folder) for path in paths]
    wanted = set(image_keys)
    rows = {key: row for row, key in enumerate(keys) if key in wanted}
    at = np.array([rows.get(key, -1) for key in image_keys], dtype=np.intp)  # -1: the last row, which is NaN
    # Names that none of the images has, and of which there is no file either, are told.
    unused = np.arange(len(rectangles)) < len(names)
    unused[at] = False
    others = [name for i in np.flatnonzero(unused).tolist() if not is_url(name := names[i])]
    exist = are_there(others, folder)
    return rectangles[at], [name for name, exists in zip(others, exist, strict=True) if not exists]


@lru_cache(maxsize=2)  # each dataset of a run reads it; `state` is its length and time
def _table(path: str, *state: int) -> tuple[str, list[str], FloatArray, list[str]]:  # noqa: ARG001
    """(folder, N names relative to it, [N + 1, 4] their rectangles and a last one of NaN, N names by `_inside`)."""
    folder = os.path.join(file_key(os.path.dirname(path)), "")
    by_columns = _parquet if path.lower().endswith(".parquet") else _json_lines
    names, rectangles = by_columns(path, read_input(path, MAX_TABLE_BYTES))
    keys = names
    text = "/" + "/".join(names)
    if os.name == "nt" or any(odd in text for odd in _ODD_NAMES):
        keys = [name if is_url(name) else _inside(file_key(os.path.join(folder, name)), folder) for name in names]
    if len(set(keys)) < len(keys):
        last = {key: row for row, key in enumerate(keys)}
        twice = next(name for row, (name, key) in enumerate(zip(names, keys, strict=True)) if last[key] != row)
        raise ConfigError(f"{path}: {twice!r} has more than one focus; keep one, or one rectangle around all")
    return folder, names, np.concatenate([rectangles, _none(1)]), keys


def _inside(key: str, folder: str) -> str:
    return key[len(folder) :].replace(os.sep, "/") if key.startswith(folder) else key


def _none(count: int) -> FloatArray:
    return np.full((count, 4), np.nan)


def _parquet(path: str, data: bytes) -> tuple[list[str], FloatArray]:
    with as_damage(f"{path}: cannot be read as a table with the columns image and focus", error=ConfigError):
        table = bounded_table(data, ["image", "focus"])
        return _columns(table.to_pylist(), lambda k: f"{path}, row {k + 1}")


def _columns(rows: Sequence[Any], place: Callable[[int], str]) -> tuple[list[str], FloatArray]:
    """The names and rectangles of rows, all checked at once; only where one is wrong, one by one, to name it."""
    with suppress(ValueError, TypeError, KeyError, OverflowError):
        names, focus = [row["image"] for row in rows], [row["focus"] for row in rows]
        plain = {*map(type, names)} <= {str} and {*map(type, chain.from_iterable(focus))} <= {int, float}
        boxes = np.array([(*box, *box) if len(box) == 2 else box for box in focus], np.float64).reshape(len(rows), 4)
        inside = ((boxes >= 0) & (boxes <= 1)).all() and (boxes[:, :2] <= boxes[:, 2:]).all()
        if plain and inside and "" not in names:
            return names, boxes
    listed = [_row(row, place(k)) for k, row in enumerate(rows)]
    return [name for name, _ in listed], np.array([box for _, box in listed], np.float64).reshape(-1, 4)


def _json_lines(path: str, data: bytes) -> tuple[list[str], FloatArray]:
    """Parse many lines at once, or one by one if any of them is not JSON."""
    names, rectangles, number = list[str](), [_none(0)], 1
    try:
        with io.TextIOWrapper(io.BytesIO(data), encoding="utf-8-sig") as file:
            while lines := list(islice(file, _LINES)):
                placed = {f"{path}, line {k}": line for k, line in enumerate(lines, number) if line.strip()}
                rows: list[Any] = []
                with suppress(ValueError, RecursionError):
                    rows = json.loads(f"[{','.join(placed.values())}]")
                if len(rows) != len(placed):
                    rows = [_parsed(line, where) for where, line in placed.items()]
                parsed = _columns(rows, list(placed).__getitem__)
                names += parsed[0]
                rectangles.append(parsed[1])
                number += len(lines)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: this is not UTF-8 text ({error}); focus files are JSON Lines or Parquet") from None
    return names, np.concatenate(rectangles)


def _parsed(text: str, where: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _row(row: Any, where: str) -> Row:
    name = row.get("image") if isinstance(row, dict) else None
    if not isinstance(name, str) or not name or "focus" not in row:
        raise ConfigError(f'{where}: {str(row)[:100]} is not a row: write {{"image": "a.jpg", "focus": {_FORM}}}')
    return name, _rectangle(row["focus"], f"{where}: the focus of {name!r}")


def _rectangle(value: Any, what: str) -> tuple[float, ...]:
    """The four valid shares of a rectangle or point."""
    good = isinstance(value, (list, tuple)) and len(value) in (2, 4)
    if not good or not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in value):
        raise ConfigError(f"{what} is {str(value)[:100]}, but must be {_FORM}")
    left, top, right, bottom = value if len(value) == 4 else (*value, *value)
    if not all(-math.inf < side < math.inf for side in value):
        why = "which is not finite"
    elif min(value) < 0:
        why = "which is negative"
    elif max(value) > 1:
        why = "which lies outside the picture: give shares from 0 to 1, not pixels"
    elif left > right or top > bottom:
        why = "whose sides are swapped: give left, top, right, bottom"
    else:
        return float(left), float(top), float(right), float(bottom)
    raise ConfigError(f"{what} is {list(value)}, {why}")


def unfound(where: str, focus: FloatArray, missing: Sequence[str]) -> str:
    """One line about what `read_focus` did not find: images named in a file, or any focus at all; else ""."""
    problems = []
    if missing:
        problems.append(f"{counted(len(missing), 'image', 'is', 'are')} not there: {some(missing)}")
    if len(focus) and np.isnan(focus).any(axis=1).all():
        how = f"names are relative to {os.path.dirname(os.path.abspath(where))}, without links"
        how = f"NAME{_OWN} or NAME{_SIMPLETUNER}" if where == BESIDE else how
        problems.append(f"none of {counted(len(focus), 'image')} has a focus ({how})")
    return one_line(f"focus {where}: {'; '.join(problems)}") if problems else ""


def focus_in(where: str, image: str) -> tuple[float, ...] | None:
    """The rectangle of one image, or None. See `read_focus`."""
    (rectangle,) = read_focus(where, [image])[0].tolist()
    return None if np.isnan(rectangle).any() else tuple(rectangle)


def parsed_focus(text: str, what: str) -> tuple[float, ...] | None:
    """A rectangle written as `0.1,0.2,0.5,0.9`; None for any other text.

    Raises:
        ConfigError: numbers that are not a rectangle.
    """
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        return None
    return _rectangle(values, what)


def _beside(paths: Sequence[str]) -> FloatArray:
    out, listed = _none(len(paths)), dict[str, frozenset[str]]()
    for i, path in enumerate(paths):
        folder, name = os.path.split(path)
        stem = os.path.splitext(name)[0]
        if folder not in listed:
            listed[folder] = frozenset()
            if not is_url(path):
                # A folder that is gone: reading the image will say so.
                with suppress(FileNotFoundError), reading(folder):
                    listed[folder] = frozenset(os.listdir(folder or "."))
        if stem + _OWN in listed[folder]:
            file = os.path.join(folder, stem + _OWN)
            data = _parsed(read_text(file), file)
            out[i] = _rectangle(data.get("focus") if isinstance(data, dict) else data, f"{file}: the focus")
        elif stem + _SIMPLETUNER in listed[folder]:
            out[i] = _bbox(os.path.join(folder, stem + _SIMPLETUNER))
    return out


def _bbox(file: str) -> tuple[float, ...]:
    data = _parsed(read_text(file), file)
    if not isinstance(data, list) or not all(isinstance(box, dict) for box in data):
        raise ConfigError(f"{file}: must be a list of boxes, as SimpleTuner writes it, not {str(data)[:100]}")
    return around([_rectangle(box.get("bbox"), f"{file}: box {i}") for i, box in enumerate(data, 1)])


def around(boxes: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """The smallest rectangle around all boxes; NaN without boxes."""
    if not boxes:
        return NO_FOCUS
    sides: npt.NDArray[np.float64] = np.array(boxes, dtype=np.float64)
    return (*sides[:, :2].min(axis=0).tolist(), *sides[:, 2:].max(axis=0).tolist())


def focus_lines(rows: Iterable[tuple[str, Sequence[float]]]) -> str:
    """The text of a JSON Lines file of (image, rectangle)."""
    lines = (json.dumps({"image": name, "focus": list(box)}, ensure_ascii=False) for name, box in rows)
    return "".join(f"{line}\n" for line in lines)
