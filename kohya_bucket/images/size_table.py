"""Tables of id, width and height: CSV, JSON, Parquet, and NovelAI's pickle, without running what is in it."""

from __future__ import annotations

import csv
import io
import pickle
import pickletools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.images.arrow_files import bounded_table, holds_plain, pyarrow_modules, whole
from kohya_bucket.images.formats import MAX_SIDE
from kohya_bucket.inputs import MAX_TABLE_BYTES
from kohya_bucket.texts import one_line, parse_json, read_regular, read_text

_COLUMNS = ("id", "width", "height")
_INTS = ("INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4")
_TEXTS = ("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "STRING", "SHORT_BINSTRING", "BINSTRING")
_PUTS = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_GETS = ("GET", "BINGET", "LONG_BINGET")
_DICTS = ("MARK", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS")
_OPCODES = frozenset((*_INTS, *_TEXTS, *_PUTS, *_GETS, *_DICTS, "TUPLE", "TUPLE2", "PROTO", "FRAME", "STOP"))


@dataclass(frozen=True)
class SizeTable:
    """Images without their files.

    Attributes:
        ids: [N] int64, or [N] text where an id is not a whole number.
        sizes: [N, 2] int32 (width, height) in pixels.
    """

    ids: npt.NDArray[Any]
    sizes: npt.NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.sizes)


def read_size_table(path: str | Path) -> SizeTable:
    """Read a table by its suffix.

    - `.csv`: a header with the columns id, width, height.
    - `.json`: a list of objects with these keys, a list of `[id, width, height]`, or `{id: [width, height]}`.
    - `.parquet`: these columns, or path instead of id as `cache sizes` writes them (needs pyarrow).
    - `.pkl`, `.pickle`: what NovelAI's program reads, `{id: (width, height)}`; nothing in the file is executed.

    Raises:
        KohyaBucketError: another suffix, a missing column, a value that is not a whole number, an id twice.
    """
    source = Path(path)
    suffix = source.suffix.lower()
    if suffix not in _READERS:
        raise KohyaBucketError(f"{path}: no table of sizes is read from {suffix or 'a file without suffix'}; "
                               f"give a .csv, .json, .parquet or .pkl file")  # fmt: skip
    return _table(_READERS[suffix](source), source)


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
        data = parse_json(text)
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


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"asks for {module}.{name}")


def _pickle_rows(path: Path) -> Iterable[tuple[Any, Any, Any]]:
    """Of the mapping in a pickle made of one dict, pairs, ints and strings only."""
    data = read_regular(path, MAX_TABLE_BYTES)
    with as_damage(f"{path} is damaged or not a pickle", error=KohyaBucketError):
        if odd := _odd(data):
            raise KohyaBucketError(
                f"{path} {odd}, but must be a dict of id: (width, height), of pairs, whole numbers and texts only: "
                "refused, nothing was run. Write the table as CSV or JSON instead"
            )
        found = _Unpickler(io.BytesIO(data), encoding="utf-8", errors="surrogatepass").load()
    if type(found) is not dict:
        raise KohyaBucketError(f"{path} holds a {type(found).__name__}, but must be a dict of id: (width, height)")
    return _mapping_rows(found, path)


def _odd(data: bytes) -> str | None:
    """What a pickle has that no mapping of sizes needs: it may run programs, or take very long or much memory."""
    before, count = ["", "", ""], 0
    arg: Any
    for opcode, arg, _ in pickletools.genops(data):
        name, count = opcode.name, count + 1
        if name not in _OPCODES:
            return f"asks for {name}" + (f" {arg}" if arg is not None else "")
        if name in _INTS and (isinstance(arg, bool) or not -(2**63) <= arg < 2**63):
            return "holds a bool" if isinstance(arg, bool) else f"holds a number of {arg.bit_length()} bits"
        if name in _PUTS:
            if arg is not None and arg > count:  # the memo is made as large as the largest number
                return f"keeps an object as number {arg}"
            continue
        # A pair in a pair thirty times over takes a hundred bytes, and its hash 2^30 steps.
        plain = all(one in _INTS or one in _TEXTS for one in before[1:])
        if name in ("TUPLE", "TUPLE2") and not (plain and (name == "TUPLE2" or before[0] == "MARK")):
            return "holds a tuple that is not a pair of whole numbers or texts"
        if name != "FRAME":
            before = [*before[1:], name]
    return None


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
    missing = [name for name in _COLUMNS if name not in names]
    if missing:
        raise KohyaBucketError(f"{path} has no {', '.join(missing)}: a table of sizes needs id, width and height")


def _table(rows: Iterable[tuple[Any, Any, Any]], path: Path) -> SizeTable:
    sizes: dict[Any, list[int]] = {}
    for key, width, height in rows:
        if not isinstance(key, (int, float, str, tuple)):
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
    try:
        keys = np.array([_whole(key) for key in sizes], dtype=np.int64)
    except (ValueError, OverflowError):
        keys = np.array([str(key) for key in sizes])
    return SizeTable(keys, np.array([*sizes.values()], dtype=np.int64).reshape(-1, 2).clip(-1).astype(np.int32))


def _whole(value: Any) -> int:
    if type(value) in (int, str) or (isinstance(value, float) and value.is_integer()):
        number = int(value)
        if -(2**63) <= number < 2**63:
            return number
    raise ValueError(value)


_READERS = {
    ".csv": _csv_rows,
    ".json": _json_rows,
    ".parquet": _parquet_rows,
    ".pkl": _pickle_rows,
    ".pickle": _pickle_rows,
}
TABLE_SUFFIXES = tuple(_READERS)
