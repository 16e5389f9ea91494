"""Parquet and Arrow files through pyarrow, which is an extra: read whole, or part by part."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.extras import pip_install
from kohya_bucket.images.pieces import Blocks, RawFile
from kohya_bucket.images.remote import RemoteFile, is_url
from kohya_bucket.texts import one_line

__all__ = [
    "IMAGE_COLUMN",
    "ROWS_OF_PART",
    "TABLE_ENDINGS",
    "ParquetRows",
    "Part",
    "bounded_table",
    "is_marked",
    "parts_of_table",
    "pyarrow_modules",
    "read_by_groups",
    "read_table",
]

_ROWS_PER_BYTE = 8  # more is nothing that was ever written: even a row of constants has a path or a checksum
_BYTES_PER_BYTE = 1000
_SMALL = 1 << 26


def read_table(source: Any, columns: list[str] | None = None) -> Any:
    """The table in a Parquet file that is open or a buffer.

    Read on this thread alone: pyarrow's own threads may let go of a Python object after the interpreter has ended,
    which aborts the process (apache/arrow #34314).
    """
    _, pq = pyarrow_modules()
    with pq.ParquetFile(source) as file:
        return file.read(columns=columns, use_threads=False)


def bounded_table(data: Any, columns: list[str]) -> Any:
    """`columns` of a Parquet file in memory that anybody may have written, whose texts are valid UTF-8.

    Its own statements of how many rows and bytes it holds are looked at before it is unpacked.

    Raises:
        ValueError: it states more than its length allows, or lacks a column.
        pyarrow.ArrowException, OSError: it is damaged, or no Parquet file.
    """
    pa, pq = pyarrow_modules()
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        found, length = file.metadata, len(data)
        nbytes = sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups))
        if found.num_rows > length * _ROWS_PER_BYTE or nbytes > max(_SMALL, length * _BYTES_PER_BYTE):
            raise ValueError(f"it claims to hold {found.num_rows} rows, {nbytes} bytes, in a file of {length}")
        names = file.schema_arrow.names
        if missing := [name for name in columns if names.count(name) != 1]:
            raise ValueError(f"it has no column {', '.join(missing)}")
        table = file.read(columns=columns, use_threads=False)
    table.validate(full=True)
    return table


def is_marked(path: str, key: bytes) -> bool:
    """Whether a file is a Parquet file with `key` in its metadata, and whole enough to tell."""
    _, pq = pyarrow_modules()
    with suppress(KohyaBucketError, OSError), as_damage(path, error=KohyaBucketError), pq.ParquetFile(path) as file:
        return key in (file.schema_arrow.metadata or {})
    return False


def pyarrow_modules() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise KohyaBucketError(
            f"Parquet and Arrow files, such as a metadata cache, need pyarrow: {pip_install('parquet')}"
        ) from None
    return pyarrow, pyarrow.parquet


IMAGE_COLUMN = "image"
TABLE_ENDINGS = (".parquet", ".arrow")
ROWS_OF_PART = 16
_BUFFER = 1 << 20
_BYTES = ("binary", "large_binary", "binary_view")  # as Arrow names its types
_TEXTS = ("string", "large_string", "string_view")
_ARROW_FILE = b"ARROW1"  # begins a file that can be read from its end; what follows after 8 bytes is a stream


class Part(NamedTuple):
    """Some rows that follow each other.

    Attributes:
        images, captions: Arrow arrays; the latter None where none are wanted.
        offsets: [N] int64, where the bytes of each image lie in the file; None where they do not lie there as they are.
    """

    images: Any
    captions: Any
    offsets: npt.NDArray[np.int64] | None


def read_by_groups(path: str) -> bool:
    """Whether a row is read with those before it."""
    return path.lower().endswith(".parquet")


def parts_of_table(path: str, image: str, caption: str | None) -> Iterator[Part]:
    """All rows of a table, in their order. One part is in memory, of an Arrow file one record batch.

    Raises:
        KohyaBucketError: no such column, or one that holds something else.
        OSError, pyarrow.ArrowException: it cannot be read.
    """
    if not read_by_groups(path):
        yield from _arrow_parts(path, image, caption)
        return
    table = ParquetRows(path, image, caption)
    for group in range(len(table.starts)):
        yield from table.parts(group)


class ParquetRows:
    """A Parquet file, open.

    Attributes:
        rows: how many.
        starts: the first row of each row group.
    """

    def __init__(self, path: str, image: str, caption: str | None) -> None:
        pa, pq = pyarrow_modules()
        if is_url(path):
            far = RemoteFile(path)
            source, length = pa.PythonFile(io.BufferedReader(RawFile(Blocks(far))), mode="r"), far.length
        else:
            source, length = path, os.path.getsize(path)
        # So a column is read page by page; else a whole row group of it.
        self._file = pq.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)
        rows = self._file.metadata.num_rows
        if rows > length * _ROWS_PER_BYTE:
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
        """The rows of a group, `ROWS_OF_PART` at a time."""
        batches = self._file.iter_batches(
            batch_size=ROWS_OF_PART, row_groups=[group], columns=self._columns, use_threads=False
        )  # fmt: skip
        image, caption = self._names
        for batch in batches:
            yield Part(batch.column(image), None if caption is None else batch.column(caption), None)


def _arrow_parts(path: str, image: str, caption: str | None) -> Iterator[Part]:
    """Read, not mapped: a mapped file that another program shortens ends the process."""
    if is_url(path):
        raise KohyaBucketError(f"{path}: Arrow files are read on this machine only: name Parquet files there")
    pa, _ = pyarrow_modules()
    with pa.OSFile(path) as file:
        file.seek(8 if file.read(len(_ARROW_FILE)) == _ARROW_FILE else 0)
        schema = pa.ipc.read_schema(file)
        _check(path, schema, image, caption)
        while (message := _next_message(pa, file)) is not None:
            if message.type != "record batch":
                raise KohyaBucketError(f"{path}: holds a {message.type}, which is not read here: write it as Parquet")
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
            images = batch.column(image)
            start = file.tell() - message.body.size
            offsets = start + _places(path, images, message.body)
            yield Part(images, None if caption is None else batch.column(caption), offsets)


def _next_message(pa: Any, file: Any) -> Any:
    """None at the end, which is marked, or is that of the file."""
    try:
        return pa.ipc.read_message(file)
    except EOFError:
        return None


def _places(path: str, images: Any, body: Any) -> npt.NDArray[np.int64]:
    """[N] where in `body` the bytes of each image begin."""
    pa, _ = pyarrow_modules()
    if pa.types.is_struct(images.type):
        images = images.field(images.type.get_field_index("bytes"))
    if str(images.type) == "binary_view":
        raise KohyaBucketError(
            f"{path}: holds images of type {images.type}, which is not read here: write it as Parquet"
        )
    if not len(images):
        return np.zeros(0, np.int64)
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
            there = ", ".join(schema.names) or "none"
            raise KohyaBucketError(f"{path}: has no column {column!r}, but {there}: name the right one by {option}")
    kind = schema.field(image).type
    if pa.types.is_struct(kind) and (at := kind.get_field_index("bytes")) >= 0:
        kind = kind.field(at).type
    if str(kind) in _TEXTS:
        raise KohyaBucketError(
            f"{path}: its column {image!r} holds texts, not the bytes of image files: if these are paths or addresses, "
            "write them to a .txt file and name that, else name the column of bytes by --image-column"
        )
    if str(kind) not in _BYTES:
        raise KohyaBucketError(
            f"{path}: its column {image!r} holds {one_line(kind)}, not the bytes of image files: name the column that "
            "does by --image-column"
        )
    if caption is not None and str(schema.field(caption).type) not in _TEXTS:
        raise KohyaBucketError(
            f"{path}: its column {caption!r} holds {one_line(schema.field(caption).type)}, not texts: name one that "
            "does by --caption-column"
        )
