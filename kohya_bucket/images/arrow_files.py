"""Parquet files that are read in full, through pyarrow, which is optional."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.extras import pip_install
from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.inputs import open_input, read_input

_MAGIC = b"PAR1"
_MOST_BYTES = 1 << 32
ROWS_PER_BYTE = 8  # more is impossible: even a row of constants has a path or a checksum
_BYTES_PER_BYTE = 1000
_SMALL = 1 << 26
TEXTS = ("string", "large_string", "string_view")  # Arrow's names of types


def parquet_bytes(path: str | os.PathLike[str], limit: int = _MOST_BYTES) -> bytes:
    """The bytes of a Parquet file.

    Raises:
        ValueError: it does not begin and end like one.
        OSError: it cannot be read, is not a file, or is longer than `limit`.
    """
    with open_input(path) as file:
        begin = file.read(len(_MAGIC))
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(_MAGIC)))
        if begin != _MAGIC or file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is not a Parquet file")
    return read_input(path, limit)


def bounded_table(data: Any, columns: list[str]) -> Any:
    """`columns` of a Parquet file in memory that anyone may have written; texts are valid UTF-8.

    The numbers of rows and bytes that it states are checked before it is unpacked. Everything is read on this thread:
    pyarrow's threads may release a Python object after the interpreter has ended, which aborts the process
    (apache/arrow #34314).

    Raises:
        ValueError: it states more than its length allows, or lacks a column.
        pyarrow.ArrowException, OSError: it is damaged, or not a Parquet file.
    """
    pa, pq = pyarrow_modules()
    with pq.ParquetFile(pa.BufferReader(data)) as file:
        stated, length = file.metadata, len(data)
        nbytes = sum(stated.row_group(i).total_byte_size for i in range(stated.num_row_groups))
        if stated.num_rows > length * ROWS_PER_BYTE or nbytes > max(_SMALL, length * _BYTES_PER_BYTE):
            raise ValueError(f"it claims to hold {stated.num_rows} rows, {nbytes} bytes, in a file of {length}")
        names = file.schema_arrow.names
        if missing := [name for name in columns if names.count(name) != 1]:
            raise ValueError(f"it has no column {', '.join(missing)}")
        table = file.read(columns=columns, use_threads=False)
    table.validate(full=True)
    return table


def numpy_of(column: Any) -> npt.NDArray[Any]:
    """[N] a column of numbers or flags without gaps; numbers without a copy.

    Like `arrow_of`, and unlike pyarrow's own methods, it does not import pandas, which takes 0.2 s and 70 MB.
    """
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    data, here = array.buffers()[1] or b"", slice(array.offset, array.offset + len(array))
    if array.type.bit_width == 1:
        return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[here].view(np.bool_)
    name = str(array.type)
    return np.frombuffer(data, {"float": "float32", "halffloat": "float16"}.get(name, name))[here]


def holds_plain(column: Any) -> bool:
    """Whether a column holds texts or numbers, dictionary-encoded or not."""
    pa, _ = pyarrow_modules()
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    return str(kind) in TEXTS or bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def checked_numbers(column: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """[N] a copy of a column. `ValueError` if it has another type, or gaps."""
    if column.type != np.dtype(dtype).name:
        raise ValueError(f"a column of {column.type} where {np.dtype(dtype)} belongs")
    return np.array(numpy_of(whole(column)))


def checked_texts(column: Any) -> TextColumn:
    """A column of texts. `ValueError` if it has gaps."""
    pa, _ = pyarrow_modules()
    array = whole(column).cast(pa.large_string()).combine_chunks()
    if len(array) == 0:
        return TextColumn.from_texts([])
    _, offsets, pool = array.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return TextColumn(pool[int(ends[0]) : int(ends[-1])].to_pybytes() if pool else b"", ends - ends[0])


def whole(column: Any) -> Any:
    """The column. `ValueError` if it has gaps."""
    if column.null_count:
        raise ValueError(f"a column of {column.type} with {column.null_count} gaps")
    return column


def some_texts(column: Any) -> dict[int, str]:
    """The texts of a sparse column, by row."""
    listed = column.cast("string").to_pylist() if column.null_count < len(column) else []
    return {i: text for i, text in enumerate(listed) if text is not None}


def arrow_texts(texts: TextColumn) -> Any:
    """Texts as an Arrow array, without a copy."""
    pa, _ = pyarrow_modules()
    offsets = pa.py_buffer(texts.offsets.astype(np.int64))
    return pa.Array.from_buffers(pa.large_string(), len(texts), [None, offsets, pa.py_buffer(texts.pool)])


def arrow_of(values: npt.NDArray[Any]) -> Any:
    """[N] numbers as an Arrow array, without a copy if they are contiguous."""
    pa, _ = pyarrow_modules()
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def is_marked(path: str, key: bytes) -> bool:
    """Whether a file is a readable Parquet file with `key` in its metadata."""
    _, pq = pyarrow_modules()
    try:
        with as_damage(path, error=KohyaBucketError), open_input(path) as opened, pq.ParquetFile(opened) as file:
            return key in (file.schema_arrow.metadata or {})
    except (KohyaBucketError, OSError):
        return False


def pyarrow_modules() -> tuple[Any, Any]:
    """`pyarrow` and `pyarrow.parquet`. `KohyaBucketError` where they are not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise KohyaBucketError(
            "caches of sizes, stores of latents and other Parquet or Arrow files need pyarrow, which is not installed: "
            f"{pip_install('parquet')}"
        ) from None
    return pyarrow, pyarrow.parquet
