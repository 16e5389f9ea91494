"""`MetadataCache` as a Parquet file, readable by anything else that reads Parquet.

Columns: path (text), width, height (int32), mtime_ns, bytes (int64), format (text: PNG, JPEG, …),
orientation (uint8), hash (text or null), reason (text, null where readable).
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.files import replace_file
from kohya_bucket.images.cache.metadata_rows import MetadataRows
from kohya_bucket.images.files.content_hash import HASH_LENGTH
from kohya_bucket.images.formats import ImageFormat
from kohya_bucket.images.tables.parquet import bounded_table, is_marked, pyarrow_modules
from kohya_bucket.images.tables.text_column import TextColumn

__all__ = ["is_metadata_cache", "load", "save"]

_VERSION_KEY = b"kohya_bucket_metadata_version"
_VERSION = 1
_COLUMNS = ["path", "width", "height", "mtime_ns", "bytes", "format", "orientation", "hash", "reason"]
_HEXADECIMAL = set("0123456789abcdef")


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
    return is_marked(path, _VERSION_KEY)


def load(path: str) -> tuple[dict[str, Any], TextColumn]:
    """The columns of `MetadataCache`, by attribute, and its paths; whoever wrote the file.

    Raises:
        KohyaBucketError: no such file, a damaged one, one of a newer version, or with values that no file has.
    """
    pa, _ = pyarrow_modules()
    if not os.path.isfile(path):
        raise KohyaBucketError(f"{path}: no such metadata cache; make one with: kohya-bucket build-cache … --output")
    with as_damage(
        f"{path}: not a metadata cache, or damaged",
        "name another, or build it again",
        error=KohyaBucketError,
    ):
        # Read whole and closed again: a mapped file could not be replaced on Windows.
        with open(path, "rb") as file:
            table = bounded_table(file.read(), _COLUMNS)
        version = int((table.schema.metadata or {}).get(_VERSION_KEY, b"0"))
        if not version:
            raise ValueError("it has no version")
        if version > _VERSION:
            raise KohyaBucketError(
                f"{path}: written by a newer version of this package (format {version}, known: {_VERSION}); "
                "update the package, or build the cache again"
            )
        column = {name: table.column(name) for name in _COLUMNS}
        reasons = column["reason"].cast(pa.string())
        listed = reasons.to_pylist() if reasons.null_count < len(table) else []
        sizes = np.stack([_numbers(column["width"], np.int32), _numbers(column["height"], np.int32)], axis=1)
        orientation = _numbers(column["orientation"], np.uint8)
        _refuse_impossible(sizes, orientation)
        columns = {
            "sizes": sizes,
            "mtime_ns": _numbers(column["mtime_ns"], np.int64),
            "bytes": _numbers(column["bytes"], np.int64),
            "formats": _formats(column["format"], pa),
            "orientation": orientation,
            "hashes": _hashes(column["hash"]),
            "reasons": {i: reason for i, reason in enumerate(listed) if reason is not None},
        }
        return columns, _texts(column["path"], pa)


def _refuse_impossible(sizes: npt.NDArray[np.int32], orientation: npt.NDArray[np.uint8]) -> None:
    wrong = (sizes < 0).any(axis=1) | ((sizes == 0).any(axis=1) & (sizes != 0).any(axis=1))
    if wrong.any():
        width, height = sizes[int(wrong.argmax())].tolist()
        raise ValueError(f"an image of {width}x{height} pixels in row {int(wrong.argmax())}")
    wrong = (orientation < 1) | (orientation > 8)
    if wrong.any():
        raise ValueError(f"an orientation of {orientation[int(wrong.argmax())]} in row {int(wrong.argmax())}")


def _numbers(column: Any, dtype: Any) -> npt.NDArray[Any]:
    if column.null_count or column.type != np.dtype(dtype).name:
        raise ValueError(f"a column of {column.type} with {column.null_count} gaps where {np.dtype(dtype)} belongs")
    return np.array(column.to_numpy(), dtype=dtype)


def _formats(column: Any, pa: Any) -> npt.NDArray[np.uint8]:
    names = _whole(column).cast(pa.string()).dictionary_encode().combine_chunks()
    members = ImageFormat.__members__
    codes = np.array([int(members.get(name, ImageFormat.OTHER)) for name in names.dictionary.to_pylist()], np.uint8)
    return codes[names.indices.to_numpy()] if len(names) else np.zeros(0, np.uint8)


def _hashes(column: Any) -> npt.NDArray[np.bytes_] | None:
    if column.null_count == len(column):
        return None
    texts = column.fill_null("").to_pylist()
    if not all(text == "" or (len(text) == HASH_LENGTH and set(text) <= _HEXADECIMAL) for text in texts):
        raise ValueError(f"a hash that is none of {HASH_LENGTH} hexadecimal digits")
    return np.array(texts, dtype=f"S{HASH_LENGTH}")


def _whole(column: Any) -> Any:
    if column.null_count:
        raise ValueError(f"a column of {column.type} with {column.null_count} gaps")
    return column


def _texts(column: Any, pa: Any) -> TextColumn:
    array = _whole(column).cast(pa.large_string()).combine_chunks()
    if len(array) == 0:
        return TextColumn.of([])
    _, offsets, pool = array.buffers()
    ends = np.frombuffer(offsets, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    return TextColumn(pool[int(ends[0]) : int(ends[-1])].to_pybytes() if pool else b"", ends - ends[0])
