"""`MetadataCache` as a Parquet file, readable by anything else that reads Parquet.

Columns: path (text), width, height (int32), mtime_ns, bytes (int64), format (text: PNG, JPEG, …),
orientation (uint8), hash (text or null), reason (text, null where readable).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.cache.metadata_rows import MetadataRows
from kohya_bucket.images.files.content_hash import HASH_LENGTH
from kohya_bucket.images.files.replace import replace_file
from kohya_bucket.images.formats import ImageFormat
from kohya_bucket.images.tables.parquet import pyarrow_modules, read_table
from kohya_bucket.images.tables.text_column import TextColumn

__all__ = ["is_metadata_cache", "load", "save"]

_VERSION_KEY = b"kohya_bucket_metadata_version"
_VERSION = 1
_COLUMNS = ["path", "width", "height", "mtime_ns", "bytes", "format", "orientation", "hash", "reason"]


def save(path: str, cache: MetadataRows) -> None:
    pa, pq = pyarrow_modules()
    n = len(cache)
    offsets, pool = pa.py_buffer(cache.paths.offsets.astype(np.int64)), pa.py_buffer(cache.paths.pool)
    reasons: list[str | None] = [None] * n
    for i, reason in cache.reasons.items():
        reasons[i] = reason
    names = pa.array([kind.name for kind in ImageFormat])
    hashes = None if cache.hashes is None else cache.hashes.astype(f"U{HASH_LENGTH}")
    table = pa.table(
        [
            pa.Array.from_buffers(pa.large_string(), n, [None, offsets, pool]),
            pa.array(np.ascontiguousarray(cache.sizes[:, 0])),
            pa.array(np.ascontiguousarray(cache.sizes[:, 1])),
            pa.array(cache.mtime_ns),
            pa.array(cache.bytes),
            pa.DictionaryArray.from_arrays(pa.array(cache.formats.astype(np.int8)), names),
            pa.array(cache.orientation),
            pa.nulls(n, pa.string()) if hashes is None else pa.array(hashes, pa.string(), mask=hashes == ""),
            pa.array(reasons, pa.string()),
        ],
        names=_COLUMNS,
    ).replace_schema_metadata({_VERSION_KEY: str(_VERSION).encode()})
    replace_file(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def is_metadata_cache(path: str) -> bool:
    """Whether a file was written by `save`, of this or another version, and is whole enough to tell."""
    pa, pq = pyarrow_modules()
    try:
        with pq.ParquetFile(path) as file:
            return _VERSION_KEY in (file.schema_arrow.metadata or {})
    except (pa.ArrowException, OSError):
        return False


def load(path: str) -> tuple[dict[str, Any], TextColumn]:
    """The columns of `MetadataCache`, by attribute, and its paths."""
    pa, _ = pyarrow_modules()
    if not os.path.isfile(path):
        raise KohyaBucketError(f"{path}: no such metadata cache; make one with: kohya-bucket build-cache … --output")
    try:
        # Read whole and closed again: a mapped file could not be replaced on Windows.
        with open(path, "rb") as file:
            table = read_table(file)
    except (pa.ArrowException, OSError) as error:
        raise KohyaBucketError(f"{path}: damaged or no Parquet file ({error}); delete it and build it again") from None
    version = int((table.schema.metadata or {}).get(_VERSION_KEY, b"0"))
    missing = [name for name in _COLUMNS if name not in table.column_names]
    if missing or not version:
        raise KohyaBucketError(f"{path}: not a metadata cache (no {', '.join(missing) or 'version'}); build it again")
    if version > _VERSION:
        raise KohyaBucketError(
            f"{path}: written by a newer version of this package (format {version}, known: {_VERSION}); "
            "update the package, or build the cache again"
        )
    column = {name: table.column(name) for name in _COLUMNS}
    reasons = column["reason"].to_pylist() if column["reason"].null_count < len(table) else []
    columns = {
        "sizes": np.stack([_numbers(column["width"], np.int32), _numbers(column["height"], np.int32)], axis=1),
        "mtime_ns": _numbers(column["mtime_ns"], np.int64),
        "bytes": _numbers(column["bytes"], np.int64),
        "formats": _formats(column["format"], pa),
        "orientation": _numbers(column["orientation"], np.uint8),
        "hashes": _hashes(column["hash"]),
        "reasons": {i: reason for i, reason in enumerate(reasons) if reason is not None},
    }
    return columns, _texts(column["path"], pa)


def _numbers(column: Any, dtype: Any) -> npt.NDArray[Any]:
    return np.array(column.to_numpy(), dtype=dtype)


def _formats(column: Any, pa: Any) -> npt.NDArray[np.uint8]:
    names = column.cast(pa.string()).dictionary_encode().combine_chunks()
    members = ImageFormat.__members__
    codes = np.array([int(members.get(name, ImageFormat.OTHER)) for name in names.dictionary.to_pylist()], np.uint8)
    return codes[names.indices.to_numpy()] if len(names) else np.zeros(0, np.uint8)


def _hashes(column: Any) -> npt.NDArray[np.bytes_] | None:
    if column.null_count == len(column):
        return None
    return np.array(column.fill_null("").to_numpy(), dtype=f"S{HASH_LENGTH}")


def _texts(column: Any, pa: Any) -> TextColumn:
    array = column.cast(pa.large_string()).combine_chunks()
    if len(array) == 0:
        return TextColumn.of([])
    _, offsets, pool = array.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return TextColumn(pool[int(ends[0]) : int(ends[-1])].to_pybytes() if pool else b"", ends - ends[0])
