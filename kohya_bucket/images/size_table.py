"""Tables of id, width and height: CSV, JSON and Parquet."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.images.arrow_files import bounded_table, holds_plain, pyarrow_modules
from kohya_bucket.images.formats import MAX_SIDE
from kohya_bucket.inputs import MAX_TABLE_BYTES
from kohya_bucket.texts import each_name_once, one_line, parse_json, read_regular, read_text

_COLUMNS = ["id", "width", "height"]
_IDS = ("id", "path", "key")


def read_size_table(path: str | Path) -> npt.NDArray[np.int32]:
    """[N, 2] int32 (width, height) in pixels of images without their files, as `read_named_sizes`."""
    return read_named_sizes(path)[1]


def read_named_sizes(path: str | Path) -> tuple[list[str], npt.NDArray[np.int32]]:
    """N ids, and [N, 2] int32 (width, height) in pixels of images without their files, read by the table's suffix.

    (0, 0) where a width or a height is not stated, as dumps leave it out of what they could not load.

    - `.csv`: a header with the columns id, width, height.
    - `.json`: a list of objects with these keys, a list of `[id, width, height]`, or `{id: [width, height]}`.
    - `.parquet`: these columns (needs pyarrow).

    Instead of id there may be path, as `cache sizes` writes it, or key, as img2dataset does.

    Raises:
        KohyaBucketError: another suffix, a missing column, a value that is not a whole number, an id twice.
    """
    source = Path(path)
    suffix = source.suffix.lower()
    if suffix not in _READERS:
        raise KohyaBucketError(
            f"{path}: no table of sizes is read from {suffix or 'a file without suffix'}; give a .csv, .json or "
            ".parquet file"
        )
    return _named_sizes(_READERS[suffix](source), source)


def _csv_rows(path: Path) -> Iterable[tuple[Any, Any, Any]]:
    reader = csv.DictReader(io.StringIO(read_text(path, MAX_TABLE_BYTES)))
    try:
        columns = _columns_in(path, reader.fieldnames or [])
        return [(row[columns[0]], row["width"], row["height"]) for row in reader]
    except csv.Error as error:
        raise KohyaBucketError(f"{path}, line {reader.line_num}: not valid CSV: {error}") from None


def _json_rows(path: Path) -> Iterable[tuple[Any, Any, Any]]:
    text = read_text(path, MAX_TABLE_BYTES)
    with as_damage(f"{path} is not valid JSON", error=KohyaBucketError):
        data = parse_json(text, each_name_once)
    if isinstance(data, dict):
        return _mapping_rows(data, path)
    if not isinstance(data, list):
        raise KohyaBucketError(f"{path} holds a {type(data).__name__}, but must be a list of id, width and height")
    names = dict.fromkeys(chain.from_iterable(entry for entry in data if isinstance(entry, dict)))
    columns = _columns_in(path, names) if names else _COLUMNS
    rows: list[Any] = []
    for i, entry in enumerate(data):
        if isinstance(entry, dict):
            entry = [entry.get(name) for name in columns]
        if not isinstance(entry, list) or len(entry) != 3:
            raise KohyaBucketError(f"{path}: entry {i} is {entry!r}, but must be id, width and height")
        rows.append(entry)
    return rows


def _mapping_rows(data: dict[Any, Any], path: Path) -> Iterable[tuple[Any, Any, Any]]:
    for key, size in data.items():
        if not isinstance(size, (list, tuple)) or len(size) != 2:
            raise KohyaBucketError(f"{path}: {key!r} has {size!r}, but must have a width and a height")
        yield key, size[0], size[1]


def _parquet_rows(path: Path) -> Iterable[tuple[Any, Any, Any]]:
    _, pq = pyarrow_modules()
    data = read_regular(path, MAX_TABLE_BYTES)
    with as_damage(f"{path}: damaged or not a Parquet file", error=KohyaBucketError):
        columns = _columns_in(path, pq.read_schema(io.BytesIO(data)).names)
        table = bounded_table(data, columns)
    for name in columns:
        if not holds_plain(table.column(name)):
            held = f"holds {one_line(table.column(name).type)}, but must hold numbers or texts"
            raise KohyaBucketError(f"{path}: its column {name!r} {held}")
    return zip(*(table.column(name).to_pylist() for name in columns), strict=True)


def _columns_in(path: Path, names: Iterable[str]) -> list[str]:
    """The names of the three columns in a table."""
    names = list(names)
    columns = [next((name for name in _IDS if name in names), "id"), *_COLUMNS[1:]]
    for name in columns:
        if names.count(name) > 1:
            raise KohyaBucketError(f"{path} has the column {name} {names.count(name)} times: keep one of them")
    missing = [name for name in columns if name not in names]
    if missing:
        raise KohyaBucketError(f"{path} has no {', '.join(missing)}: a table of sizes needs id, width and height")
    return columns


def _named_sizes(rows: Iterable[tuple[Any, Any, Any]], path: Path) -> tuple[list[str], npt.NDArray[np.int32]]:
    sizes: dict[Any, list[int]] = {}
    for key, width, height in rows:
        if not isinstance(key, (int, float, str)):
            raise KohyaBucketError(f"{path}: the id {str(key)[:100]} is neither a number nor a text")
        if key in sizes:
            raise KohyaBucketError(f"{path}: the id {key!r} occurs twice: every image needs its own")
        try:
            sizes[key] = [0, 0] if _is_left_out(width) or _is_left_out(height) else [_whole(width), _whole(height)]
        except ValueError:
            raise KohyaBucketError(f"{path}: {key!r} is {width!r}x{height!r}, but sides are whole numbers") from None
        if max(sizes[key]) > MAX_SIDE:
            width, height = sizes[key]
            raise KohyaBucketError(
                f"{path}: {key!r} is {width:,}x{height:,}, but no side is longer than {MAX_SIDE:,} pixels"
            )
    return [*map(str, sizes)], np.array([*sizes.values()], dtype=np.int64).reshape(-1, 2).clip(-1).astype(np.int32)


_LEFT_OUT = frozenset(("", "none", "null", "nan", "\\n"))  # as CSV files have it


def _is_left_out(value: Any) -> bool:
    """Whether there is no value here: in floats, as columns of whole numbers with gaps become, it is NaN."""
    if isinstance(value, str):
        return value.strip().lower() in _LEFT_OUT
    return value is None or value != value


def _whole(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*\d+\.0*\s*", value):  # a column with gaps, written by pandas
        value = value.partition(".")[0]
    if type(value) in (int, str) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
        if -(2**63) <= number < 2**63:
            return number
    raise ValueError(value)


_READERS = {".csv": _csv_rows, ".json": _json_rows, ".parquet": _parquet_rows}
TABLE_SUFFIXES = tuple(_READERS)
