"""Images in a column of a table: Parquet files, and the Arrow files that `datasets` saves.

A cell is the bytes of an image file, or a struct with a field `bytes` as in Hugging Face datasets. An image in an Arrow
file is read in place. Reading a row of Parquet decodes all rows before it in its row group: so a reader continues from
its last row, and rows on the way are cached for other readers, up to a limit per process.
"""

from __future__ import annotations

import bisect
import functools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, NamedTuple

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
TABLE_ENDINGS = (".parquet", ".arrow")
_ROWS_OF_PART = 16
_BUFFER = 1 << 20
_BYTES = ("binary", "large_binary", "binary_view")  # Arrow's names of types
_ARROW_FILE = b"ARROW1"  # magic of the file format: 8 bytes, then a stream
_MOST_CACHED = 384 << 20
_REMEDY = "copy or build it again"


@dataclass
class ScannedRows:
    """The result of one pass over the columns of a table.

    Attributes:
        stamp: of the file before it was read.
        sizes: [N, 2] int32 (width, height) of each row's image as stored; (0, 0) where there is none.
        offsets, lengths: [N] int64, of each image's bytes in the file; offset -1: they are encoded there.
        reasons: why a row has no image, by row.
        captions: N cells of the caption column; None without one.
    """

    stamp: Stamp
    sizes: npt.NDArray[np.int32]
    offsets: npt.NDArray[np.int64]
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
    offsets: list[npt.NDArray[np.int64]] = [np.zeros(0, np.int64)]
    reasons: dict[int, str] = {}
    captions: list[Any] | None = None if caption is None else []
    with as_damage(f"{path}: cannot be read as a table", _REMEDY, error=KohyaBucketError):
        if read_by_groups(path):
            table = ParquetRows(path, image, caption)
            parts: Iterator[Part] = chain.from_iterable(map(table.parts, range(len(table.starts))))
        else:
            parts = _arrow_parts(path, image, caption)
        for part in parts:
            offsets.append(part.offsets)
            for cell in part.images:
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
                captions += part.captions.to_pylist()
    check_unchanged(path, stamp_or_refuse(path), stamp)
    pixels, byte_counts = np.array(sizes, np.int32).reshape(-1, 2), np.array(lengths, np.int64)
    return ScannedRows(stamp, pixels, np.concatenate(offsets), byte_counts, reasons, captions)


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
        self._parts: Iterator[Part] = iter(())

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
        path, stamp, _ = self._key
        if self._group != group or self._next > number:
            self._parts, self._group, self._next = self._table.parts(group), group, 0
        while self._next <= number:
            part = next(self._parts).images
            check_unchanged(path, stamp_or_refuse(path), stamp)
            _part_cache.put((self._key, group, self._next), part)
            self._next += 1
        return part


_reader = functools.lru_cache(maxsize=32)(_TableReader)


class Part(NamedTuple):
    """Some consecutive rows.

    Attributes:
        images, captions: Arrow arrays; None without a caption column.
        offsets: [N] int64, of each image's bytes in the file; -1: they are encoded there.
    """

    images: Any
    captions: Any
    offsets: npt.NDArray[np.int64]


def read_by_groups(path: str) -> bool:
    """Whether reading a row decodes those before it."""
    return path.lower().endswith(".parquet")


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
        self._names = image, caption
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        *self.starts, self.rows = accumulate(groups, initial=0)

    def parts(self, group: int) -> Iterator[Part]:
        """The rows of a group, `_ROWS_OF_PART` at a time."""
        image, caption = self._names
        options: dict[str, Any] = {"columns": self._columns, "use_threads": False}
        for batch in self._file.iter_batches(_ROWS_OF_PART, [group], **options):
            nowhere = np.full(len(batch), -1, np.int64)
            yield Part(batch.column(image), None if caption is None else batch.column(caption), nowhere)


def _arrow_parts(path: str, image: str, caption: str | None) -> Iterator[Part]:
    """The batches of an Arrow file. It is read, not mapped: truncating a mapped file would crash the process."""
    if is_url(path):
        raise KohyaBucketError(f"{path}: Arrow files are read on this machine only: name Parquet files there")
    pa, _ = pyarrow_modules()
    with pa.OSFile(path) as file:
        file.seek(8 if file.read(len(_ARROW_FILE)) == _ARROW_FILE else 0)
        schema = pa.ipc.read_schema(file)
        _check(path, schema, image, caption)
        while True:
            message = None
            with suppress(EOFError):
                message = pa.ipc.read_message(file)
            if message is None:  # the end mark is optional
                return
            if message.type != "record batch":
                raise KohyaBucketError(f"{path}: holds a {message.type}, which is not read here: write it as Parquet")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            images = batch.column(image)
            offsets = file.tell() - message.body.size + _places(path, images, message.body)
            yield Part(images, None if caption is None else batch.column(caption), offsets)


def _places(path: str, images: Any, body: Any) -> npt.NDArray[np.int64]:
    """[N] offset of each image's bytes in the body of a message."""
    pa, _ = pyarrow_modules()
    if pa.types.is_struct(images.type):
        images = images.field(images.type.get_field_index("bytes"))
    if str(images.type) == "binary_view":
        raise KohyaBucketError(
            f"{path}: holds images of type {images.type}, which is not read here: write it as Parquet"
        )
    if not len(images):
        return np.zeros(0, np.int64)
    # Arrow stores all images of a batch in one buffer, with the edges between them; compressed, it is not in the file.
    _, starts, data = images.buffers()
    kind = np.int64 if str(images.type) == "large_binary" else np.int32
    edges = np.frombuffer(starts, kind)[images.offset : images.offset + len(images) + 1].astype(np.int64)
    if edges[0] == edges[-1]:
        return np.zeros(len(images), np.int64)
    edges += data.address - body.address
    if edges[0] < 0 or edges[-1] > body.size:
        raise KohyaBucketError(f"{path}: holds its images compressed: save it again without, or as Parquet")
    return edges[:-1]


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
