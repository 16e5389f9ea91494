"""Parquet files that are read whole, through pyarrow, which is an extra."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.extras import pip_install

ROWS_PER_BYTE = 8  # more is nothing that was ever written: even a row of constants has a path or a checksum
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
        if found.num_rows > length * ROWS_PER_BYTE or nbytes > max(_SMALL, length * _BYTES_PER_BYTE):
            raise ValueError(f"it claims to hold {found.num_rows} rows, {nbytes} bytes, in a file of {length}")
        names = file.schema_arrow.names
        if missing := [name for name in columns if names.count(name) != 1]:
            raise ValueError(f"it has no column {', '.join(missing)}")
        table = file.read(columns=columns, use_threads=False)
    table.validate(full=True)
    return table


def numpy_of(column: Any) -> npt.NDArray[Any]:
    """[N] a column of numbers or flags without gaps, numbers without a copy.

    As `arrow_of`, and unlike pyarrow's own ways, it does not import pandas where that is installed: 0.2 s and 70 MB.
    """
    array = column.combine_chunks() if hasattr(column, "combine_chunks") else column
    data, here = array.buffers()[1] or b"", slice(array.offset, array.offset + len(array))
    if array.type.bit_width == 1:
        return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")[here].view(np.bool_)
    name = str(array.type)
    return np.frombuffer(data, {"float": "float32", "halffloat": "float16"}.get(name, name))[here]


def arrow_of(values: npt.NDArray[Any]) -> Any:
    """[N] numbers as an Arrow array, without a copy."""
    pa, _ = pyarrow_modules()
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


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
            "reading Parquet or Arrow, as caches of sizes and stores of latents are, needs pyarrow, which is not "
            f"installed: {pip_install('parquet')}"
        ) from None
    return pyarrow, pyarrow.parquet
