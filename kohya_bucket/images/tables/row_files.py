"""Files of rows, opened to be read part by part: Parquet, and Arrow as `datasets` writes it."""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, Protocol

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.files.pieces import Blocks, RawFile
from kohya_bucket.images.files.remote import RemoteFile, is_url
from kohya_bucket.images.tables.parquet import pyarrow_modules
from kohya_bucket.texts import one_line

__all__ = ["IMAGE_COLUMN", "TABLE_ENDINGS", "RowFile", "opened_table", "read_by_groups"]

IMAGE_COLUMN = "image"
TABLE_ENDINGS = (".parquet", ".arrow")
_ROWS = 16
_BUFFER = 1 << 20


class RowFile(Protocol):
    """A table in groups of rows.

    Attributes:
        rows: how many.
        starts: the first row of each group.
        rows_of_part: how many rows a part has; the last one of a group may have fewer.
        images: the whole column, where a row of it is read at random; else None.
    """

    rows: int
    starts: list[int]
    rows_of_part: int
    images: Any

    def parts(self, group: int) -> Iterator[tuple[Any, Any]]:
        """The images of a group and its captions (None where none are wanted), part by part, each an Arrow array."""


def read_by_groups(path: str) -> bool:
    """Whether a row is read with those before it."""
    return path.lower().endswith(".parquet")


def opened_table(path: str, image: str, caption: str | None) -> RowFile:
    """A table with these columns.

    Raises:
        KohyaBucketError: no such column, or one that holds something else.
        OSError, pyarrow.ArrowException: it cannot be read.
    """
    return (_Parquet if read_by_groups(path) else _Arrow)(path, image, caption)


class _Parquet:
    rows_of_part = _ROWS
    images = None

    def __init__(self, path: str, image: str, caption: str | None) -> None:
        pa, pq = pyarrow_modules()
        source = path
        if is_url(path):
            source = pa.PythonFile(io.BufferedReader(RawFile(Blocks(RemoteFile(path)))), mode="r")
        # With a buffer, a column is read page by page; without, a whole row group of it.
        self._file = pq.ParquetFile(source, buffer_size=_BUFFER)
        schema = self._file.schema_arrow
        _check(path, schema, image, caption)
        leaf = f"{image}.bytes" if pa.types.is_struct(schema.field(image).type) else image
        self._columns = [leaf, *([] if caption is None else [caption])]
        self._names = image, caption
        groups = [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        *self.starts, self.rows = accumulate(groups, initial=0)

    def parts(self, group: int) -> Iterator[tuple[Any, Any]]:
        batches = self._file.iter_batches(
            batch_size=_ROWS, row_groups=[group], columns=self._columns, use_threads=False
        )  # fmt: skip
        image, caption = self._names
        for batch in batches:
            yield batch.column(image), None if caption is None else batch.column(caption)


class _Arrow:
    def __init__(self, path: str, image: str, caption: str | None) -> None:
        if is_url(path):
            raise KohyaBucketError(f"{path}: Arrow files are read on this machine only: name Parquet files there")
        pa, _ = pyarrow_modules()
        source = pa.memory_map(path)
        try:
            reader = pa.ipc.open_stream(source)  # as `datasets` writes them
        except pa.ArrowInvalid:
            reader = pa.ipc.open_file(source)
        _check(path, reader.schema, image, caption)
        table = reader.read_all()
        self.images = table.column(image)
        self._captions = None if caption is None else table.column(caption)
        self.rows = self.rows_of_part = len(table)
        self.starts = [0] if self.rows else []

    def parts(self, group: int) -> Iterator[tuple[Any, Any]]:
        yield self.images, self._captions


def _check(path: str, schema: Any, image: str, caption: str | None) -> None:
    pa, _ = pyarrow_modules()
    for column, option in ((image, "--image-column"), (caption, "--caption-column")):
        if column is not None and schema.names.count(column) != 1:
            there = ", ".join(schema.names) or "none"
            raise KohyaBucketError(f"{path}: has no column {column!r}, but {there}: name the right one by {option}")
    kind = schema.field(image).type
    if pa.types.is_struct(kind) and (at := kind.get_field_index("bytes")) >= 0:
        kind = kind.field(at).type
    if _is_text(kind):
        raise KohyaBucketError(
            f"{path}: its column {image!r} holds texts, not the bytes of image files: if these are paths or addresses, "
            "write them to a .txt file and name that, else name the column of bytes by --image-column"
        )
    if not (pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)):
        raise KohyaBucketError(
            f"{path}: its column {image!r} holds {one_line(kind)}, not the bytes of image files: name the column that "
            "does by --image-column"
        )
    if caption is not None and not _is_text(schema.field(caption).type):
        raise KohyaBucketError(
            f"{path}: its column {caption!r} holds {one_line(schema.field(caption).type)}, not texts: name one that "
            "does by --caption-column"
        )


def _is_text(kind: Any) -> bool:
    types = pyarrow_modules()[0].types
    return any(is_kind(kind) for is_kind in (types.is_string, types.is_large_string, types.is_string_view))
