"""A `TarIndex` as a Parquet file, which anybody may have changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.files import replace_file
from kohya_bucket.images import TextColumn
from kohya_bucket.images.tables.parquet import bounded_table, is_marked, pyarrow_modules

__all__ = ["is_tar_index", "load", "row_type", "save"]

_VERSION_KEY = b"kohya_bucket_tar_index_version"
_VERSION = b"1"
_CAPTION_KEY = b"caption"
_IMAGE_KEY = b"image"
_NUMBERS = {
    "shard": np.int32, "offset": np.int64, "length": np.int64, "width": np.int32, "height": np.int32,
    "orientation": np.int32, "caption_offset": np.int64, "caption_length": np.int64,
}  # fmt: skip

_Columns = tuple[
    list[str], list[tuple[int, int]], TextColumn, npt.NDArray[Any], dict[int, str], "str | None", "str | None"
]


def row_type() -> np.dtype[Any]:
    return np.dtype(list(_NUMBERS.items()))


def save(path: str, index: Any) -> None:
    pa, pq = pyarrow_modules()
    names = list(_NUMBERS)
    columns = [pa.array(np.ascontiguousarray(index.rows[name])) for name in names]
    reasons = [index.reasons.get(i) for i in range(len(index))]
    meta = {
        _VERSION_KEY: _VERSION,
        _CAPTION_KEY: (index.caption or "").encode(),
        _IMAGE_KEY: (index.image or "").encode(),
    }
    for i, (shard, (size, mtime)) in enumerate(zip(index.shards, index.stamps, strict=True)):
        meta[f"shard{i}".encode()] = f"{size} {mtime} {shard}".encode()
    table = pa.table(
        [pa.array(list(index.keys), pa.large_string()), *columns, pa.array(reasons, pa.string())],
        names=["key", *names, "reason"],
    ).replace_schema_metadata(meta)
    replace_file(path, lambda temporary: pq.write_table(table, temporary, compression="zstd"))


def is_tar_index(path: str) -> bool:
    """Whether a file was written by `save`."""
    return is_marked(path, _VERSION_KEY)


def load(path: str) -> _Columns:
    """The fields of a `TarIndex`, in their order.

    Raises:
        KohyaBucketError: missing, damaged, or not an index.
    """
    with as_damage(f"{path}: cannot be read as an index of shards", "build it again", error=KohyaBucketError):
        try:
            with open(path, "rb") as file:
                table = bounded_table(file.read(), ["key", *_NUMBERS, "reason"])
        except FileNotFoundError as error:
            raise KohyaBucketError(f"{path}: cannot be read as an index of shards ({error}); build it") from None
        meta = table.schema.metadata or {}
        if meta.get(_VERSION_KEY) != _VERSION:
            raise KohyaBucketError(f"{path}: not an index of shards of this version; build it again")
        rows = np.zeros(len(table), dtype=row_type())
        for name, kind in _NUMBERS.items():
            column = table.column(name)
            if column.null_count or column.type != np.dtype(kind).name:
                raise ValueError(f"its column {name} holds {column.type} with {column.null_count} gaps")
            rows[name] = column.to_numpy()
        shards: list[str] = []
        stamps: list[tuple[int, int]] = []
        while (line := meta.get(f"shard{len(shards)}".encode())) is not None:
            size, mtime, shard = line.decode().split(" ", 2)
            shards.append(shard)
            stamps.append((int(size), int(mtime)))
        _refuse_impossible(rows, np.array([size for size, _ in stamps], np.int64))
        if table.column("key").null_count or table.column("key").type not in ("large_string", "string"):
            raise ValueError(f"its column key holds {table.column('key').type}")
        why = table.column("reason").cast("string").to_pylist()
        reasons = {i: reason for i, reason in enumerate(why) if reason is not None}
        keys = TextColumn.of(table.column("key").to_pylist())
        caption, image = (meta.get(key, b"").decode() or None for key in (_CAPTION_KEY, _IMAGE_KEY))
        return shards, stamps, keys, rows, reasons, caption, image


def _refuse_impossible(rows: npt.NDArray[Any], lengths: npt.NDArray[np.int64]) -> None:
    if not len(rows):
        return
    if rows["shard"].min() < 0 or rows["shard"].max() >= len(lengths):
        raise ValueError(f"a sample in shard {rows['shard'].min()} or {rows['shard'].max()} of {len(lengths)}")
    ends = lengths[rows["shard"]]
    for name in ("", "caption_"):
        start, length = rows[f"{name}offset"], rows[f"{name}length"]
        if ((start < 0) | (length < 0) | (start > ends) | (length > ends - start)).any():
            raise ValueError("a sample after the end of its shard")
    if min(rows["width"].min(), rows["height"].min()) < 0 or not 0 <= rows["orientation"].min() <= 8:
        raise ValueError("an image of less than no pixels, or an unknown orientation")
