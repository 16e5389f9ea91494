"""Images in a column of a table: Parquet files, and the Arrow files in which `datasets` saves a data set.

A cell holds the bytes of an image file, or is a struct with such a field `bytes`, as Hugging Face has it.

An image in an Arrow file is read where it lies. Parquet cannot do this: to read a row, all rows before it in its row
group are decoded. So a reader goes on from where it was, and the rows that it passes are kept for whoever comes next,
up to a limit for the whole process. Memory is that limit, and a page of each open column, however large a row group.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.images.arrow_files import (
    IMAGE_COLUMN,
    ROWS_OF_PART,
    TABLE_ENDINGS,
    ParquetRows,
    Part,
    parts_of_table,
    read_by_groups,
)
from kohya_bucket.images.formats import UnreadableImageError, explain_os_error
from kohya_bucket.images.headers import header_of
from kohya_bucket.images.parallel import check_cancelled
from kohya_bucket.images.stamps import Stamp, check_unchanged, stamp_of

__all__ = ["IMAGE_COLUMN", "TABLE_ENDINGS", "ScannedRows", "places_of_rows", "read_by_groups", "read_row", "scan_rows"]

_KEPT = 384 << 20
_OPEN = 32
_REMEDY = "copy or build it again"


@dataclass
class ScannedRows:
    """What one pass over the columns of a table says.

    Attributes:
        stamp: what the file had before it was read.
        sizes: [N, 2] int32 (width, height) of each row's image as stored; (0, 0) where there is none.
        offsets, lengths: [N] int64, where the bytes of each image lie in the file (-1: nowhere as they are), and how
            many they are.
        reasons: why a row has no image, by row.
        captions: N cells of the column of captions; None where none was asked for.
    """

    stamp: Stamp
    sizes: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    reasons: dict[int, str]
    captions: list[Any] | None = field(default=None)


def scan_rows(image: str, caption: str | None, path: str) -> ScannedRows:
    """The header of each image of a table, and the captions. A few rows at a time are in memory.

    Args:
        image, caption: names of columns.

    Raises:
        KohyaBucketError: no such file, no such column, one that holds no images, or a damaged file.
    """
    stamp = _stamp_of(path)
    sizes: list[tuple[int, int]] = []
    lengths: list[int] = []
    offsets: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    reasons: dict[int, str] = {}
    captions: list[Any] | None = None if caption is None else []
    with as_damage(f"{path}: cannot be read as a table", _REMEDY, error=KohyaBucketError):
        for part in parts_of_table(path, image, caption):
            offsets.append(np.full(len(part.images), -1) if part.offsets is None else part.offsets)
            for cell in part.images:
                check_cancelled()
                data = _bytes_in(cell)
                lengths.append(len(data or b""))
                try:
                    sizes.append(_size_of(data))
                except UnreadableImageError as error:
                    reasons[len(sizes)] = str(error)
                    sizes.append((0, 0))
            if captions is not None:
                captions += part.captions.to_pylist()
    check_unchanged(path, _stamp_of(path), stamp)
    return ScannedRows(
        stamp, np.array(sizes, np.int32).reshape(-1, 2), np.concatenate(offsets), np.array(lengths, np.int64),
        reasons, captions,
    )  # fmt: skip


def places_of_rows(path: str, stamp: Stamp, image: str) -> dict[str, tuple[int, int]]:
    """Offset and length in the file of each image, by the number of its row; of a table that has them there.

    Raises as `scan_rows`.
    """
    places: list[tuple[int, int]] = []
    with as_damage(f"{path}: cannot be read as a table", _REMEDY, error=KohyaBucketError):
        for part in parts_of_table(path, image, None):
            lengths = [len(_bytes_in(cell) or b"") for cell in part.images]
            places += zip([] if part.offsets is None else part.offsets.tolist(), lengths, strict=True)
    check_unchanged(path, _stamp_of(path), stamp)
    return {str(row): place for row, place in enumerate(places)}


def read_row(path: str, stamp: Stamp, image: str, row: int) -> bytes:
    """The bytes of one image of a Parquet file, which had its stamp after they were read.

    Raises:
        KohyaBucketError: the file cannot be read or has changed, has no such row, or the cell is empty.
    """
    with as_damage(f"{path}: cannot be read as a table", _REMEDY, error=KohyaBucketError):
        try:
            data = _reader(path, stamp, image).image(row)
        except FileNotFoundError as error:
            raise KohyaBucketError(f"{path}: {explain_os_error(error)}") from None
    if not data:
        raise KohyaBucketError(f"{path}: row {row} has no image")
    return data


def _bytes_in(cell: Any) -> bytes | None:
    """What a cell holds of an image; None: nothing."""
    value = cell.as_py()
    found: bytes | None = value.get("bytes") if isinstance(value, dict) else value
    return found


def _size_of(data: bytes | None) -> tuple[int, int]:
    if data is None:
        raise UnreadableImageError("no bytes of an image in this cell; a path alone is not followed")
    width, height, _, _ = header_of(data)
    return width, height


def _stamp_of(path: str) -> Stamp:
    try:
        return stamp_of(path)
    except OSError as error:
        raise KohyaBucketError(f"{path}: this table cannot be read ({explain_os_error(error)})") from None


class _Kept:
    """Parts of columns that were read last, by file, column and first row. Any thread may use it."""

    def __init__(self) -> None:
        self._parts: OrderedDict[Any, Any] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def get(self, key: Any) -> Any:
        with self._lock:
            if key in self._parts:
                self._parts.move_to_end(key)
            return self._parts.get(key)

    def put(self, key: Any, part: Any) -> None:
        with self._lock:
            if key not in self._parts:
                self._parts[key] = part
                self._nbytes += part.nbytes
            while self._nbytes > _KEPT and len(self._parts) > 1:
                self._nbytes -= self._parts.popitem(last=False)[1].nbytes


_kept = _Kept()


class _Reader:
    """One column of a Parquet file, of which each part is read after the one before."""

    def __init__(self, path: str, stamp: Stamp, image: str) -> None:
        self._path, self._stamp, self._key = path, stamp, (path, stamp, image)
        self._table = ParquetRows(path, image, None)
        self._lock = threading.Lock()
        self._group, self._next = -1, 0
        self._parts: Iterator[Part] = iter(())

    def image(self, row: int) -> bytes | None:
        if not 0 <= row < self._table.rows:
            raise KohyaBucketError(f"{self._path}: has no row {row}, but {self._table.rows} rows")
        group = bisect.bisect_right(self._table.starts, row) - 1
        number, at = divmod(row - self._table.starts[group], ROWS_OF_PART)
        with self._lock:
            part = _kept.get((self._key, group, number))
            if part is None:
                try:
                    part = self._read(group, number)
                except BaseException:  # such as a request that failed: nothing comes after it
                    self._group = -1
                    raise
        return _bytes_in(part[at])

    def _read(self, group: int, number: int) -> Any:
        """A part; those before it are passed, and kept too."""
        if self._group != group or self._next > number:
            self._parts, self._group, self._next = self._table.parts(group), group, 0
        while True:
            part = next(self._parts).images
            found = (self._key, self._group, self._next)
            self._next += 1
            check_unchanged(self._path, _stamp_of(self._path), self._stamp)
            _kept.put(found, part)
            if found[2] == number:
                return part


@functools.lru_cache(maxsize=_OPEN)
def _reader(path: str, stamp: Stamp, image: str) -> _Reader:
    return _Reader(path, stamp, image)
