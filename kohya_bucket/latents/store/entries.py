"""The rows of a store: one per item, as Parquet inside every shard and again in the manifest.

A file's rows are checked once, when they are read: their types, and that they point at what is there.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.images.arrow_files import bounded_table, numpy_of, pyarrow_modules
from kohya_bucket.latents.dtypes import EXACT, LATENT_DTYPES
from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.store.shards import KINDS, ShardInfo

Columns = Mapping[str, Any]  # by a column's name, one value for each row
SIDES = ("left", "top", "right", "bottom")
NUMBER_COLUMNS = {
    **{f"{name}_size": (f"{name}_width", f"{name}_height") for name in ("bucket", "resized", "original")},
    "crop": ("crop_left", "crop_top"),
    "crop_ltrb": tuple(f"ltrb_{side}" for side in SIDES),
}
"""The columns of attributes that consist of several numbers."""
OPAQUE, WITHOUT_MASKS = -1, -2
"""In `mask_row`, in place of a row: an image that needs no mask, and an item that was stored without."""
SEQUENCE = "written_ns"
"""The column of `SequenceNumbers`: of two rows with one key the greater counts. It is no time."""
FORMAT = "kohya_bucket.latents"
VERSION = 1


@dataclass(frozen=True)
class StoreEntry:
    """One item of the store.

    Attributes:
        source: path of the image relative to the store's root of images, with forward slashes. Together with
            `collection` it is the item's key: the row written last counts.
        fingerprint: what the latent depends on.
        original_size: (width, height) of the image file in pixels.
        crop_ltrb: left, top, right, bottom of the crop, SDXL's conditioning; see `buckets.geometry`.
        caption: text, or None.
        collection: separates latents of the same images, e.g. of two models or resolutions, in one store.
    """

    source: str
    fingerprint: Fingerprint
    original_size: tuple[int, int]
    crop_ltrb: tuple[float, float, float, float]
    caption: str | None = None
    collection: str = ""

    def rows(self) -> dict[str, list[Any]]:
        """The item as columns of one row, see `table_of_rows`."""
        row = vars(self) | vars(self.fingerprint)
        del row["fingerprint"]
        for name, columns in NUMBER_COLUMNS.items():
            row |= zip(columns, row.pop(name), strict=True)
        return {name: [value] for name, value in row.items()}

    @classmethod
    def from_values(cls, values: Columns) -> StoreEntry:
        """An item by the names of its attributes and those of its fingerprint."""
        fingerprint = Fingerprint(*[values[name] for name in Fingerprint.__match_args__])
        return cls(values["source"], fingerprint, *[values[name] for name in cls.__match_args__[2:]])


def arrow() -> tuple[Any, Any, Any]:
    """pyarrow, pyarrow.compute and pyarrow.parquet. `KohyaBucketError` if pyarrow is not installed."""
    pa, pq = pyarrow_modules()
    return pa, importlib.import_module("pyarrow.compute"), pq


def schema() -> Any:
    """Columns of a row; docs/latent-format.md says what each means."""
    pa, _, _ = arrow()
    words = pa.dictionary(pa.int32(), pa.string())
    text = pa.large_string()  # a column of the other kind ends at 2 GB, which 36 million names of 60 characters reach
    fields = [
        ("collection", words), ("source", text),
        ("source_bytes", pa.int64()), ("source_mtime_ns", pa.int64()), ("source_hash", text),
        ("vae", words),
        ("bucket_width", pa.int32()), ("bucket_height", pa.int32()),
        ("resized_width", pa.int32()), ("resized_height", pa.int32()),
        ("crop_left", pa.int32()), ("crop_top", pa.int32()),
        ("interpolation", words), ("dtype", words), ("kind", words), ("flip", pa.bool_()), ("mask", pa.bool_()),
        ("original_width", pa.int32()), ("original_height", pa.int32()),
        ("ltrb_left", pa.float64()), ("ltrb_top", pa.float64()),
        ("ltrb_right", pa.float64()), ("ltrb_bottom", pa.float64()),
        ("caption", text),
        (SEQUENCE, pa.int64()), ("shard", words), ("row", pa.int32()), ("mask_row", pa.int32()),
        ("crc_plain", pa.uint32()), ("crc_flipped", pa.uint32()), ("crc_mask", pa.uint32()),
    ]  # fmt: skip
    return pa.schema(fields)


def table_of_rows(parts: Sequence[Columns], places: Columns) -> Any:
    """One table of written rows.

    Args:
        parts: some rows each, with all columns of `schema` but those that say where a row lies.
        places: these columns, for all rows.
    """
    pa, _, _ = arrow()
    columns: dict[str, Any] = {name: [] for name in schema().names if name not in places} | dict(places)
    for part in parts:
        for name, values in part.items():
            columns[name] += values.tolist() if isinstance(values, np.ndarray) else values
    return pa.table([pa.array(columns[f.name], f.type) for f in schema()], schema=schema())


def narrowed(column: Any) -> Any:
    """The same values in the smallest Arrow type that holds them: the 30 columns of a million items take a third less
    memory."""
    pa, _, _ = arrow()
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(narrowed(column.indices), column.dictionary)
    if kind == pa.float64():
        small = column.cast(pa.float32())
        return small if small.cast(kind).equals(column) else column
    integers = (pa.int8(), pa.int16(), pa.int32()) if pa.types.is_integer(kind) else ()
    for smaller in (pa.string(),) if kind == pa.large_string() else integers:
        with suppress(pa.ArrowInvalid):  # a value that it cannot hold
            return column.cast(smaller)
    return column


def encode(table: Any, description: dict[str, Any]) -> bytes:
    """Parquet file of `table`, with `description` (JSON) in its metadata."""
    _, _, pq = arrow()
    table = table.cast(schema())
    text = json.dumps(description | {"format": FORMAT, "version": VERSION}, separators=(",", ":"))
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({FORMAT: text}), out, compression="zstd", store_schema=True)
    return out.getvalue()


def decode(data: Any) -> tuple[Any, dict[str, Any]]:
    """Table and description that `encode` wrote. Raises `LatentStoreError` for anything else, or a newer version."""
    wanted = schema()
    with as_damage("not a table of latents"):
        table = bounded_table(data, wanted.names)
        description = json.loads((table.schema.metadata or {})[FORMAT.encode()].decode("utf-8"))
        version = description["version"]
        if type(version) is not int or version > VERSION:
            raise LatentStoreError(
                f"written by a newer kohya-bucket (format {version!r}, this one reads {VERSION}): upgrade"
            )
        return table.replace_schema_metadata(None).cast(wanted), description


WORDS = ("vae", "interpolation", "dtype", "kind", "collection")


class ItemTable:
    """N items, one row each.

    Attributes:
        table: Arrow table, see `entries.schema`; of each item the row written last, by (collection, source).
    """

    def __init__(self, table: Any) -> None:
        self.table = table
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._words: dict[str, tuple[list[str], npt.NDArray[Any]]] = {}

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> npt.NDArray[Any]:
        """[N] a column of numbers or flags, perhaps of a small type, see `narrowed`."""
        if name not in self._columns:
            self._columns[name] = numpy_of(self.table[name])
        return self._columns[name]

    def words(self, name: str) -> tuple[list[str], npt.NDArray[Any]]:
        """The distinct words of a column that has few, and [N] the position of each item's word among them."""
        if name not in self._words:
            column = self.table[name].unify_dictionaries().combine_chunks()
            self._words[name] = list(column.dictionary.to_pylist()), numpy_of(column.indices)
        return self._words[name]

    def strings(self, name: str) -> list[Any]:
        """N strings, a column of text; None where an item has none."""
        return list(self.table[name].to_pylist())

    def numbers(self, name: str, i: int) -> tuple[Any, ...]:
        """An attribute of item `i` that consists of several numbers, one of `NUMBER_COLUMNS`."""
        return tuple([self.column(column)[i].item() for column in NUMBER_COLUMNS[name]])

    def entry(self, i: int) -> StoreEntry:
        """What item `i` is."""
        values: dict[str, Any] = {name: self.numbers(name, i) for name in NUMBER_COLUMNS}
        values |= {name: self.column(name)[i].item() for name in ("source_bytes", "source_mtime_ns", "flip", "mask")}
        values |= {name: self.table[name][i].as_py() for name in ("source", "source_hash", "caption", *WORDS)}
        return StoreEntry.from_values(values)

    def columns(self, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
        """What these items depend on, as columns for `fingerprint.differences`."""
        columns = self.source_columns(rows) | {name: self.column(name)[rows] for name in ("flip", "mask")}
        for name in WORDS[:-1]:
            words, codes = self.words(name)
            columns[name] = np.array(words, dtype=object)[codes[rows]] if len(rows) else np.zeros(0, dtype=object)
        for name in ("bucket_size", "resized_size", "crop"):
            columns[name] = np.stack([self.column(column)[rows] for column in NUMBER_COLUMNS[name]], axis=1)
        return columns

    def source_columns(self, rows: npt.NDArray[np.int64]) -> dict[str, Any]:
        """The images that these items were made from, as columns for `fingerprint.source_changes`."""
        columns = {name: self.column(name)[rows] for name in ("source_bytes", "source_mtime_ns")}
        return columns | {"source_hash": self.table["source_hash"].take(rows)}  # stays in Arrow: few are looked at

    def find(self, sources: Sequence[str], collection: str = "") -> npt.NDArray[np.int64]:
        """[M] positions of the items with these sources in `collection`; -1 where there is none."""
        pa, pc, _ = arrow()
        rows = self.in_collection(collection)
        if not len(rows):
            return np.full(len(sources), -1, dtype=np.int64)
        stored = self.table["source"].take(pa.array(rows)) if len(rows) < len(self) else self.table["source"]
        positions = pc.index_in(pa.array(sources, stored.type), value_set=stored.combine_chunks())
        at = np.asarray(pc.fill_null(positions, -1)).astype(np.int64)
        return np.where(at < 0, -1, rows[at])

    def collections(self) -> list[str]:
        """Names of the collections that hold items."""
        _, pc, _ = arrow()
        return sorted(pc.unique(self.table["collection"]).to_pylist())

    def in_collection(self, name: str) -> npt.NDArray[np.int64]:
        """Positions of the items of a collection."""
        words, codes = self.words("collection")
        return np.flatnonzero(codes == words.index(name)) if name in words else np.zeros(0, dtype=np.int64)

    @property
    def bucket_sizes(self) -> npt.NDArray[np.int32]:
        """[N, 2] int32: width and height in pixels of each item's bucket."""
        return np.stack([self.column("bucket_width"), self.column("bucket_height")], axis=1).astype(np.int32)

    def shard_numbers(self) -> npt.NDArray[np.int32]:
        """[N] position of each item's shard in the sorted names of all shards that hold items."""
        words, codes = self.words("shard")
        names = np.array(words, dtype=object)
        used = np.flatnonzero(np.bincount(codes, minlength=len(names)))
        number = np.zeros(len(names), dtype=np.int32)
        number[used[np.argsort(names[used])]] = np.arange(len(used), dtype=np.int32)
        out: npt.NDArray[np.int32] = number[codes]
        return out

    def with_texts(self, **changes: dict[int, str | None]) -> Any:
        """The store's rows with other captions or content hashes, given by column and position."""
        pa, _, _ = arrow()
        table = self.table
        for name, changed in changes.items():
            texts = self.strings(name)
            for i, text in changed.items():
                texts[i] = text
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(texts, table[name].type))
        return table


MOST_NUMBER = 2**63 - 2**32  # so that there are numbers above it, see `SequenceNumbers`
_POSITIVE = ("bucket_width", "bucket_height", "resized_width", "resized_height", "original_width", "original_height")
_PLACES = ("crop_left", "crop_top")
_DTYPES = (*LATENT_DTYPES, EXACT)
_TEXTS = ("source", "collection", "vae", "interpolation", "source_hash")


def check_rows(table: Any, shards: Mapping[str, ShardInfo]) -> None:
    """Check a file's rows, and of those in `shards` also that they fit their shard.

    Raises:
        LatentStoreError: a value is missing or impossible; a row lies behind the end of its shard, or has another kind
            than the shard. Rows of captions are 0 in all columns about pixels.
    """
    _, pc, _ = arrow()
    for name in table.column_names:
        if name != "caption" and table[name].null_count:
            raise LatentStoreError(f"its column {name} has rows without a value")
    if not len(table):
        return
    kind = _codes(table, "kind", KINDS)
    _refuse(kind < 0, kind, "kind")
    texts = kind == KINDS.index("text")
    names = (*_POSITIVE, *_PLACES, SEQUENCE, "row", "mask_row")
    numbers = {name: numpy_of(table[name]) for name in names}
    for name in _POSITIVE:
        _refuse(np.where(texts, numbers[name] != 0, numbers[name] < 1), numbers[name], name)
    for name in _PLACES:
        _refuse(texts & (numbers[name] != 0), numbers[name], name)
    _refuse((numbers[SEQUENCE] < 0) | (numbers[SEQUENCE] > MOST_NUMBER), numbers[SEQUENCE], SEQUENCE)
    for side in SIDES:
        values = numpy_of(table[f"ltrb_{side}"])
        _refuse(~np.isfinite(values) | (texts & (values != 0)), values, f"ltrb_{side}")
    for name in _TEXTS:
        chunks = [getattr(chunk, "dictionary", chunk) for chunk in table[name].chunks]  # joining would copy all texts
        if any(pc.any(pc.match_substring(chunk, "\0")).as_py() for chunk in chunks):
            raise LatentStoreError(f"its column {name} has a text with a zero in it")
    _check_places(table, shards, numbers, texts)


def _check_places(
    table: Any, shards: Mapping[str, ShardInfo], numbers: Mapping[str, npt.NDArray[Any]], texts: npt.NDArray[np.bool_]
) -> None:
    """Check what rows say of their shards: that the row is in it, with the parts and of the kind that it states.

    A row of a shard that is not in `shards` can lie anywhere: the shard may be away, and come back.
    """
    column = table["shard"].unify_dictionaries().combine_chunks()
    infos = [shards.get(name) for name in column.dictionary.to_pylist()]
    shard_of_row = numpy_of(column.indices)
    present = np.array([info is not None for info in infos], dtype=bool)[shard_of_row]

    def of_shards(value: Any) -> npt.NDArray[Any]:
        return np.asarray(np.array([0 if info is None else value(info) for info in infos])[shard_of_row])

    row, mask_row = numbers["row"], numbers["mask_row"]
    _refuse(present & ((row < 0) | (row >= of_shards(lambda info: info.rows))), row, "row")
    masks = of_shards(lambda info: info.tensors["alpha_mask"].shape[0] if "alpha_mask" in info.tensors else 0)
    mask = numpy_of(table["mask"])
    impossible = (mask_row < WITHOUT_MASKS) | (mask_row >= masks) | ((mask_row == WITHOUT_MASKS) == mask)
    _refuse(present & impossible, mask_row, "mask_row")
    flip = numpy_of(table["flip"])
    flipped = of_shards(lambda info: any(name.endswith("_flipped") for name in info.tensors)).astype(bool)
    _refuse((present & flip & ~flipped) | (texts & flip), flip, "flip")
    _refuse(texts & mask, mask, "mask")
    kind, dtype = _codes(table, "kind", KINDS), _codes(table, "dtype", _DTYPES)
    _refuse(present & (kind != of_shards(lambda info: KINDS.index(info.kind))), kind, "kind")
    stored = of_shards(lambda info: _DTYPES.index(EXACT if info.arrays else info.latents.dtype))
    exact = dtype == _DTYPES.index(EXACT)
    _refuse((dtype < 0) | (exact != texts) | (present & (dtype != stored)), dtype, "dtype")


def _codes(table: Any, name: str, allowed: Sequence[str]) -> npt.NDArray[Any]:
    """Position in `allowed` of each row's word, -1 for any other word."""
    words = table[name].unify_dictionaries().combine_chunks()
    codes = np.array([allowed.index(word) if word in allowed else -1 for word in words.dictionary.to_pylist()])
    return np.asarray(codes[numpy_of(words.indices)])


def _refuse(bad: npt.NDArray[np.bool_], values: npt.NDArray[Any], name: str) -> None:
    if bad.any():
        raise LatentStoreError(f"its column {name} has the impossible value {values[int(bad.argmax())]}")
