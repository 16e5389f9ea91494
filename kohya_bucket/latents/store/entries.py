"""The rows of the store: one per item, kept as Parquet inside every shard and again in the manifest."""

from __future__ import annotations

import importlib
import io
import json
from dataclasses import dataclass
from typing import Any

from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.extras import pip_install
from kohya_bucket.images.arrow_files import bounded_table
from kohya_bucket.latents.fingerprint import Fingerprint

__all__ = ["StoreEntry", "arrow", "decode", "encode", "entry_at", "schema", "to_table"]

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
        crop_ltrb: the crop box sd-scripts hands to SDXL as conditioning.
        caption: text, or None.
        collection: separates latents of the same images, e.g. of two models or resolutions, in one store.
    """

    source: str
    fingerprint: Fingerprint
    original_size: tuple[int, int]
    crop_ltrb: tuple[float, float, float, float]
    caption: str | None = None
    collection: str = ""


def arrow() -> tuple[Any, Any, Any]:
    """pyarrow, pyarrow.compute and pyarrow.parquet.

    Raises:
        LatentStoreError: pyarrow is not installed.
    """
    try:
        names = ("pyarrow", "pyarrow.compute", "pyarrow.parquet")
        pa, pc, pq = (importlib.import_module(name) for name in names)
    except ImportError as error:
        raise LatentStoreError(
            f"a latent store needs pyarrow, which is not installed ({error}): {pip_install('parquet')}"
        ) from error
    return pa, pc, pq


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
        ("written_ns", pa.int64()), ("shard", words), ("row", pa.int32()), ("mask_row", pa.int32()),
        ("crc_plain", pa.uint32()), ("crc_flipped", pa.uint32()), ("crc_mask", pa.uint32()),
    ]  # fmt: skip
    return pa.schema(fields)


def to_table(entries: list[StoreEntry], places: dict[str, list[Any]]) -> Any:
    """Arrow table of `entries`; `places` gives the columns from `written_ns` on, one value per entry."""
    pa, _, _ = arrow()
    prints = [e.fingerprint for e in entries]
    columns: dict[str, list[Any]] = {
        "collection": [e.collection for e in entries],
        "source": [e.source for e in entries],
        "original_width": [e.original_size[0] for e in entries],
        "original_height": [e.original_size[1] for e in entries],
        "caption": [e.caption for e in entries],
    }
    for name in ("source_bytes", "source_mtime_ns", "source_hash", "vae", "interpolation", "dtype", "kind"):
        columns[name] = [getattr(p, name) for p in prints]
    columns["flip"] = [p.flip for p in prints]
    columns["mask"] = [p.mask for p in prints]
    for prefix, field in (("bucket", "bucket_size"), ("resized", "resized_size")):
        columns[f"{prefix}_width"] = [getattr(p, field)[0] for p in prints]
        columns[f"{prefix}_height"] = [getattr(p, field)[1] for p in prints]
    columns["crop_left"] = [p.crop[0] for p in prints]
    columns["crop_top"] = [p.crop[1] for p in prints]
    for i, side in enumerate(("left", "top", "right", "bottom")):
        columns[f"ltrb_{side}"] = [float(e.crop_ltrb[i]) for e in entries]
    columns |= places
    return pa.table({f.name: pa.array(columns[f.name], f.type) for f in schema()}, schema=schema())


def entry_at(row: dict[str, Any]) -> StoreEntry:
    """The `StoreEntry` of one row of the table."""
    fingerprint = Fingerprint(
        row["source_bytes"], row["source_mtime_ns"], row["source_hash"], row["vae"],
        (row["bucket_width"], row["bucket_height"]), (row["resized_width"], row["resized_height"]),
        (row["crop_left"], row["crop_top"]), row["interpolation"], row["dtype"], row["kind"],
        row["flip"], row["mask"],
    )  # fmt: skip
    ltrb = (row["ltrb_left"], row["ltrb_top"], row["ltrb_right"], row["ltrb_bottom"])
    original = (row["original_width"], row["original_height"])
    return StoreEntry(row["source"], fingerprint, original, ltrb, row["caption"], row["collection"])


def encode(table: Any, description: dict[str, Any]) -> bytes:
    """Parquet file of `table`, with `description` (JSON) in its metadata."""
    _, _, pq = arrow()
    text = json.dumps(description | {"format": FORMAT, "version": VERSION}, separators=(",", ":"))
    out = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({FORMAT: text}), out, compression="zstd", store_schema=True)
    return out.getvalue()


def decode(data: Any) -> tuple[Any, dict[str, Any]]:
    """Table and description of what `encode` wrote.

    Raises:
        LatentStoreError: it is no such file, or of a newer version.
    """
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
