"""Tables of id, width and height: CSV, JSON and Parquet."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.images.arrow_files import bounded_table, holds_plain, pyarrow_modules, whole
from kohya_bucket.images.formats import MAX_SIDE
from kohya_bucket.inputs import MAX_TABLE_BYTES
from kohya_bucket.texts import each_name_once, one_line, parse_json, read_regular, read_text

_COLUMNS = ("id", "width", "height")


def read_size_table(path: str | Path) -> npt.NDArray[np.int32]:
    """[N, 2] int32 (width, height) in pixels of images without their files, read by the table's suffix.

    - `.csv`: a header with the columns id, width, height.
    - `.json`: a list of objects with these keys, a list of `[id, width, height]`, or `{id: [width, height]}`.
    - `.parquet`: these columns, or path instead of id as `cache sizes` writes them (needs pyarrow).

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
    return _sizes(_READERS[suffix](source), source)


def _csv_rows(path: Path) -> Iterable[tuple[Any, Any, Any]]:
    reader = csv.DictReader(io.StringIO(read_text(path, MAX_TABLE_BYTES)))
    try:
        _need(path, reader.fieldnames or [])
        return [(row["id"], row["width"], row["height"]) for row in reader]
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
    rows: list[Any] = []
    for i, entry in enumerate(data):
        if isinstance(entry, dict):
            _need(path, entry)
            entry = [entry[name] for name in _COLUMNS]
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
        names = pq.read_schema(io.BytesIO(data)).names
        # A file of `cache sizes` names its images by path.
        columns = ["path" if "id" not in names and "path" in names else "id", "width", "height"]
        _need(path, ["id" if name == "path" else name for name in names])
        table = bounded_table(data, columns)
        for name in columns:
            if not holds_plain(table.column(name)):
                held = f"holds {one_line(table.column(name).type)}, but must hold numbers or texts"
                raise KohyaBucketError(f"{path}: its column {name!r} {held}")
        return zip(*(whole(table.column(name)).to_pylist() for name in columns), strict=True)


def _need(path: Path, names: Iterable[str]) -> None:
    names = list(names)
    for name in _COLUMNS:
        if names.count(name) > 1:
            raise KohyaBucketError(f"{path} has the column {name} {names.count(name)} times: keep one of them")
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise KohyaBucketError(f"{path} has no {', '.join(missing)}: a table of sizes needs id, width and height")


def _sizes(rows: Iterable[tuple[Any, Any, Any]], path: Path) -> npt.NDArray[np.int32]:
    sizes: dict[Any, list[int]] = {}
    for key, width, height in rows:
        if not isinstance(key, (int, float, str)):
            raise KohyaBucketError(f"{path}: the id {str(key)[:100]} is neither a number nor a text")
        if key in sizes:
            raise KohyaBucketError(f"{path}: the id {key!r} occurs twice: every image needs its own")
        try:
            sizes[key] = [_whole(width), _whole(height)]
        except ValueError:
            raise KohyaBucketError(f"{path}: {key!r} is {width!r}x{height!r}, but sides are whole numbers") from None
        if max(sizes[key]) > MAX_SIDE:
            width, height = sizes[key]
            raise KohyaBucketError(
                f"{path}: {key!r} is {width:,}x{height:,}, but no side is longer than {MAX_SIDE:,} pixels"
            )
    return np.array([*sizes.values()], dtype=np.int64).reshape(-1, 2).clip(-1).astype(np.int32)


def _whole(value: Any) -> int:
    if type(value) in (int, str) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
        if -(2**63) <= number < 2**63:
            return number
    raise ValueError(value)


_READERS = {".csv": _csv_rows, ".json": _json_rows, ".parquet": _parquet_rows}
TABLE_SUFFIXES = tuple(_READERS)
