"""Images in a column of a Parquet file.

A cell is the bytes of an image file, or a struct with a field `bytes` as in Hugging Face datasets. Reading a row
decodes all rows before it in its row group: so a reader continues from its last row, and rows on the way are cached
for other readers, up to a limit per process.
"""

from __future__ import annotations

import bisect
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.images.arrow_files import ROWS_PER_BYTE, TEXTS, pyarrow_modules
from kohya_bucket.images.formats import UnreadableImageError, explain_os_error
from kohya_bucket.images.headers import header_of
from kohya_bucket.images.parallel import check_cancelled
from kohya_bucket.images.remote import is_url, length_of, open_remote
from kohya_bucket.images.stamps import Stamp, check_unchanged, stamp_or_refuse
from kohya_bucket.texts import one_line

IMAGE_COLUMN = "image"
_ROWS_OF_PART = 16
_BUFFER = 1 << 20
_BYTES = ("binary", "large_binary", "binary_view")  # Arrow's names of types
_MOST_CACHED = 384 << 20
_REMEDY = "copy or build it again"


@dataclass
class ScannedRows:
    """The result of one pass over the columns of a table.

    Attributes:
        stamp: of the file before it was read.
        sizes: [N, 2] int32 (width, height) of each row's image as stored; (0, 0) where there is none.
        lengths: [N] int64, bytes of each image.
        reasons: why a row has no image, by row.
        captions: N cells of the caption column; None without one.
    """

    stamp: Stamp
    sizes: npt.NDArray[np.int32]
    lengths: npt.NDArray[np.int64]
    reasons: dict[int, str]
    captions: list[Any] | None = None


def scan_rows(image: str, caption: str | None, path: str) -> ScannedRows:
    """Read the header of each image of a table, and the captions. Only a few rows at a time are in memory.

    Args:
        image, caption: names of columns.

    Raises:
        KohyaBucketError: no such file or column, a column without images, or a damaged file.
    """
    stamp = stamp_or_refuse(path)
    sizes: list[tuple[int, int]] = []
    lengths: list[int] = []
    reasons: dict[int, str] = {}
    captions: list[Any] | None = None if caption is None else []
    with as_damage(f"{path}: cannot be read as a table", _REMEDY, error=KohyaBucketError):
        table = ParquetRows(path, image, caption)
        for part in chain.from_iterable(map(table.parts, range(len(table.starts)))):
            for cell in part.column(image):
                check_cancelled()
                data = _bytes_in(cell)
                lengths.append(len(data or b""))
                try:
                    if data is None:
                        raise UnreadableImageError("no bytes of an image in this cell; a path alone is not followed")
                    sizes.append(header_of(data)[:2])
                except UnreadableImageError as error:
                    reasons[len(sizes)] = str(error)
                    sizes.append((0, 0))
            if captions is not None:
                captions += part.column(caption).to_pylist()
    check_unchanged(path, stamp_or_refuse(path), stamp)
    pixels, byte_counts = np.array(sizes, np.int32).reshape(-1, 2), np.array(lengths, np.int64)
    return ScannedRows(stamp, pixels, byte_counts, reasons, captions)


def read_row(path: str, stamp: Stamp, image: str, row: int) -> bytes:
    """The bytes of one image of a Parquet file, which still has its stamp after they were read.

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


def _bytes_in(cell: Any) -> Any:
    """The bytes of an image in a cell, or None."""
    value = cell.as_py()
    return value.get("bytes") if isinstance(value, dict) else value


class _PartCache:
    """The parts of columns that were read last, by file, column and first row. Thread-safe."""

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
            while self._nbytes > _MOST_CACHED and len(self._parts) > 1:
                self._nbytes -= self._parts.popitem(last=False)[1].nbytes


_part_cache = _PartCache()


class _TableReader:
    """One column of a Parquet file, read part after part."""

    def __init__(self, path: str, stamp: Stamp, image: str) -> None:
        self._key = path, stamp, image
        self._table = ParquetRows(path, image, None)
        self._lock = threading.Lock()
        self._group, self._next = -1, 0
        self._parts: Iterator[Any] = iter(())

    def image(self, row: int) -> bytes | None:
        if not 0 <= row < self._table.rows:
            raise KohyaBucketError(f"{self._key[0]}: has no row {row}, but {self._table.rows} rows")
        group = bisect.bisect_right(self._table.starts, row) - 1
        number, at = divmod(row - self._table.starts[group], _ROWS_OF_PART)
        with self._lock:
            part = _part_cache.get((self._key, group, number))
            if part is None:
                try:
                    part = self._read(group, number)
                except BaseException:  # for example a failed request: the iterator is finished
                    self._group = -1
                    raise
        data: bytes | None = _bytes_in(part[at])
        return data

    def _read(self, group: int, number: int) -> Any:
        """Read on to a part; those on the way are cached too."""
        path, stamp, image = self._key
        if self._group != group or self._next > number:
            self._parts, self._group, self._next = self._table.parts(group), group, 0
        while self._next <= number:
            part = next(self._parts).column(image)
            check_unchanged(path, stamp_or_refuse(path), stamp)
            _part_cache.put((self._key, group, self._next), part)
            self._next += 1
        return part


_reader = functools.lru_cache(maxsize=32)(_TableReader)


class ParquetRows:
    """An open Parquet file.

    Attributes:
        rows: number of rows.
        starts: the first row of each row group.
    """

    def __init__(self, path: str, image: str, caption: str | None) -> None:
        pa, pq = pyarrow_modules()
        if is_url(path):
            remote = open_remote(path)
            source, length = pa.PythonFile(remote, mode="r"), length_of(remote)
        else:
            source, length = path, os.path.getsize(path)
        # These options read a column page by page instead of a whole row group.
        self._file = pq.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)
        rows = self._file.metadata.num_rows
        if rows > length * ROWS_PER_BYTE:
            raise KohyaBucketError(
                f"{path}: claims {rows:,} rows in {length:,} bytes: build it again, without empty rows"
            )
        schema = self._file.schema_arrow
        _check(path, schema, image, caption)
        leaf = f"{image}.bytes" if pa.types.is_struct(schema.field(image).type) else image
        self._columns = [leaf, *([] if caption is None else [caption])]
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        *self.starts, self.rows = accumulate(groups, initial=0)

    def parts(self, group: int) -> Iterator[Any]:
        """The rows of a group, `_ROWS_OF_PART` at a time, as Arrow's batches."""
        batches: Iterator[Any] = self._file.iter_batches(
            _ROWS_OF_PART, [group], columns=self._columns, use_threads=False
        )
        return batches


def _check(path: str, schema: Any, image: str, caption: str | None) -> None:
    pa, _ = pyarrow_modules()
    for column, option in ((image, "--image-column"), (caption, "--caption-column")):
        if column is not None and schema.names.count(column) != 1:
            others = ", ".join(schema.names) or "none"
            raise KohyaBucketError(f"{path}: has no column {column!r}, but {others}: name the right one by {option}")
    kind = schema.field(image).type
    if pa.types.is_struct(kind) and (at := kind.get_field_index("bytes")) >= 0:
        kind = kind.field(at).type
    if str(kind) not in _BYTES:
        held, listed = one_line(kind), ""
        if str(kind) in TEXTS:
            held, listed = "texts", "; if these are paths or addresses, write them to a .txt file and name that"
        raise KohyaBucketError(
            f"{path}: its column {image!r} holds {held}, not the bytes of image files: name the column that does by "
            f"--image-column{listed}"
        )
    if caption is not None and str(schema.field(caption).type) not in TEXTS:
        raise KohyaBucketError(
            f"{path}: its column {caption!r} holds {one_line(schema.field(caption).type)}, not texts: name one that "
            "does by --caption-column"
        )
