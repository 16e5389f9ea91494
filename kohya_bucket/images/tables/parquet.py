"""Parquet files through pyarrow, which is an extra."""

from __future__ import annotations

from typing import Any

from kohya_bucket.errors import KohyaBucketError

__all__ = ["pyarrow_modules", "read_table"]


def read_table(source: Any, columns: list[str] | None = None) -> Any:
    """The table in a Parquet file that is open or a buffer.

    Read on this thread alone: pyarrow's own threads may let go of a Python object after the interpreter has ended,
    which aborts the process (apache/arrow #34314).
    """
    _, pq = pyarrow_modules()
    with pq.ParquetFile(source) as file:
        return file.read(columns=columns, use_threads=False)


def pyarrow_modules() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise KohyaBucketError(
            "a metadata cache is a Parquet file and needs pyarrow: pip install 'kohya-bucket[parquet]'"
        ) from None
    return pyarrow, pyarrow.parquet
