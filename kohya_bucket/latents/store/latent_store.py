"""Reading a store: which items it holds, and their latents at memory speed.

The manifest is an index and nothing more. Every shard describes its own rows, so shards that no manifest names
yet are read from their own description, and manifests that are lost, old or damaged cost time, never items.
"""

from __future__ import annotations

import os
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.latent_space import LatentSpace
from kohya_bucket.latents.store.entries import Entry, arrow, decode, entry_at, schema
from kohya_bucket.latents.store.layout import Layout, ShardInfo
from kohya_bucket.latents.store.shard_file import ENTRIES, MappedShard, read_header

__all__ = ["LatentStore"]

_MAX_MAPPED = 512  # each mapping holds a file handle
_LOOKS = 5
_PLAIN, _FLIPPED, _MASK = 0, 1, 2


class LatentStore:
    """An open store. Safe to share with worker processes; each maps the shards it reads.

    Args:
        root: the store's folder.
        verify: "first" checks an item's checksum when this process first reads it (the default), "always" at
            every read, "never" not at all.

    Attributes:
        damage: (file name, what is wrong) of every shard or manifest that could not be used.

    Raises:
        LatentStoreError: there is no store, or pyarrow is missing.
    """

    def __init__(self, root: str | os.PathLike[str], *, verify: str = "first") -> None:
        if verify not in ("first", "always", "never"):
            raise LatentStoreError(f"verify={verify!r}: use 'first', 'always' or 'never'")
        self.layout = Layout(root)
        self.verify = verify
        if not self.layout.exists():
            raise LatentStoreError(
                f"{self.layout.root} is not a latent store: make one with `kohya-bucket precompute … --output {root}`"
            )
        self.damage: list[tuple[str, str]] = []
        self.shards: dict[str, ShardInfo] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look again at what is on disk, while other processes may add to it, pack or prune it."""
        known = dict(self.shards)
        for _ in range(_LOOKS):
            if self._look(known):
                break

    def _look(self, known: dict[str, ShardInfo]) -> bool:
        """False where a shard went while this looked, so that those with its items may not have been listed yet."""
        self.damage, self.shards = [], {}
        table, from_manifest, in_order = self._newest_manifest(known)
        sizes = self.layout.shard_sizes()  # after the manifest: a newer one could name shards that are not listed
        whole = True
        self.indexed = table is not None and from_manifest.keys() == sizes.keys()
        parts = [] if table is None else [table]
        self._indexed_rows = table
        for name, nbytes in sorted(sizes.items()):
            info = from_manifest.get(name)
            if info is not None and info.nbytes == nbytes:
                self.shards[name] = info
                continue
            if info is not None:
                problem = "truncated" if nbytes < info.nbytes else "too long"
                self.damage.append((name, f"{problem}: {nbytes} bytes of {info.nbytes}"))
                continue
            try:
                part, self.shards[name] = self._self_described(name, nbytes)
            except FileNotFoundError:
                whole = False
                continue
            except LatentStoreError as error:
                self.damage.append((name, str(error)))
                continue
            parts.append(part)
        self._set_table(parts, in_order and len(parts) == 1 and from_manifest.keys() <= self.shards.keys())
        return whole

    def lost_entries(self) -> list[Entry]:
        """Items that the manifest knows in shards that are truncated or gone, and that no other shard holds."""
        return [entry_at(row) for row in self.lost_rows().to_pylist()]

    def lost_rows(self) -> Any:
        """The same as rows of the manifest."""
        table = self._indexed_rows
        if table is None:
            return schema().empty_table()
        pa, pc, _ = arrow()
        lost = table.filter(
            pc.invert(pc.is_in(table["shard"].cast(pa.string()), pa.array(list(self.shards), pa.string())))
        )
        sources, collections = np.array(lost["source"].to_pylist(), object), np.array(lost["collection"].to_pylist())
        absent = np.ones(len(lost), dtype=bool)
        for name in np.unique(collections):
            here = np.flatnonzero(collections == name)
            absent[here] = self.find(sources[here].tolist(), str(name)) < 0
        return lost.filter(pa.array(absent))

    def rows_on_disk(self) -> int:
        """Rows of all usable shards, those included that newer ones have replaced."""
        return sum(next(iter(info.tensors.values())).shape[0] for info in self.shards.values())

    def part(self, names: Sequence[str]) -> LatentStore:
        """A store of these shards alone, read from their own descriptions; damaged ones are left out."""
        part = object.__new__(LatentStore)
        part.layout, part.verify, part.indexed = self.layout, self.verify, False
        part.damage, part.shards, part._indexed_rows = [], {}, None
        tables = []
        for name in names:
            try:
                nbytes = (self.layout.shards / name).stat().st_size
                table, part.shards[name] = part._self_described(name, nbytes)
                tables.append(table)
            except (LatentStoreError, FileNotFoundError) as error:
                part.damage.append((name, str(error)))
        part._set_table(tables, False)
        return part

    def _newest_manifest(self, known: dict[str, ShardInfo]) -> tuple[Any, dict[str, ShardInfo], bool]:
        tried: set[Path] = set()
        while left := [path for path in self.layout.manifests() if path not in tried]:
            path = left[0]
            tried.add(path)
            try:
                table, description = decode(self.layout.read_manifest(path))
            except FileNotFoundError:  # replaced since it was listed, by one that is listed now
                continue
            except (LatentStoreError, OSError) as error:
                self.damage.append((path.name, str(error)))
                continue
            infos = {s["name"]: known.get(s["name"]) or ShardInfo.from_json(s) for s in description["shards"]}
            return table, infos, bool(description.get("in_order"))
        return None, {}, False

    def _self_described(self, name: str, nbytes: int) -> tuple[Any, ShardInfo]:
        specs, data, _ = read_header(self.layout.shards / name)
        table, description = decode(data)
        pa, _, _ = arrow()
        for tensor, (dtype, shape) in description["tensors"].items():
            if tensor not in specs or (specs[tensor].dtype, list(specs[tensor].shape)) != (dtype, shape):
                raise LatentStoreError(f"shard {name} is damaged: its header and its entries disagree on {tensor!r}")
        column = pa.array([name] * len(table), schema().field("shard").type)
        table = table.set_column(table.schema.get_field_index("shard"), "shard", column)
        del specs[ENTRIES]
        return table, ShardInfo(name, nbytes, specs, LatentSpace(**description["space"]))

    def _set_table(self, parts: list[Any], final: bool) -> None:
        pa, pc, _ = arrow()
        table = pa.concat_tables(parts).unify_dictionaries() if parts else schema().empty_table()
        if not final:
            table = table.filter(pc.is_in(table["shard"].cast(pa.string()), pa.array(list(self.shards), pa.string())))
            table = _newest_in_order(table)
        self.table = table = table.combine_chunks()
        names = _dictionary(table, "shard")
        self._infos: list[ShardInfo | None] = [self.shards.get(name) for name in names]
        self._shard = _numbers(table["shard"].combine_chunks().indices if len(table) else None)
        self._row = self.column("row")
        self._mask_row = self.column("mask_row")
        self._crc = [self.column(name) for name in ("crc_plain", "crc_flipped", "crc_mask")]
        self._checked = np.zeros((3, len(table)), dtype=bool)
        self._mapped: OrderedDict[int, MappedShard] = OrderedDict()

    def __len__(self) -> int:
        return len(self.table)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state["_mapped"] = OrderedDict()
        return state

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers, [N]."""
        return np.asarray(self.table[name].to_numpy())

    def strings(self, name: str) -> list[Any]:
        """A column of text, as a list of N strings (None where there is none)."""
        return list(self.table[name].to_pylist())

    def entry(self, i: int) -> Entry:
        return entry_at(self.table.slice(i, 1).to_pylist()[0])

    def info(self, i: int) -> ShardInfo:
        """The shard item `i` lies in."""
        info: ShardInfo | None = self._infos[self._shard[i]]
        if info is None:
            raise LatentStoreError(f"item {i} lies in a shard that is gone")
        return info

    def find(self, sources: Sequence[str], collection: str = "") -> npt.NDArray[np.int64]:
        """[M] positions of the items with these sources in `collection`; -1 where there is none."""
        pa, pc, _ = arrow()
        here = self.in_collection(collection)
        if not len(here):
            return np.full(len(sources), -1, dtype=np.int64)
        known = self.table["source"].take(pa.array(here)) if len(here) < len(self) else self.table["source"]
        found = pc.index_in(pa.array(sources, pa.string()), value_set=known.combine_chunks())
        at = np.asarray(pc.fill_null(found, -1)).astype(np.int64)
        return np.where(at < 0, -1, here[at])

    def collections(self) -> list[str]:
        """Names of the collections that hold items."""
        _, pc, _ = arrow()
        return sorted(pc.unique(self.table["collection"]).to_pylist())

    def in_collection(self, name: str) -> npt.NDArray[np.int64]:
        """Positions of the items of a collection."""
        pa, pc, _ = arrow()
        return np.flatnonzero(np.asarray(pc.equal(self.table["collection"].cast(pa.string()), name)))

    @property
    def bucket_sizes(self) -> npt.NDArray[np.int32]:
        """[N, 2] int32: width and height in pixels of each item's bucket."""
        return np.stack([self.column("bucket_width"), self.column("bucket_height")], axis=1)

    def read(self, i: int, *, flipped: bool = False) -> npt.NDArray[Any]:
        """Item `i` as it lies in the file, in its carrier type, without a copy.

        [C, h, w] latents, or [2, C, h, w] mean and standard deviation.

        Raises:
            LatentStoreError: the flipped one was not stored, or the bytes are not those that were written.
        """
        tensors = self._tensors(i)
        name = ("latents" if "latents" in tensors else "posterior") + ("_flipped" if flipped else "")
        if name not in tensors:
            raise LatentStoreError(
                f"{self.table['source'][i]} has no flipped latent: run `kohya-bucket precompute` again with --flip"
            )
        return self._checked_row(i, tensors[name], int(self._row[i]), _FLIPPED if flipped else _PLAIN)

    def read_mask(self, i: int) -> npt.NDArray[np.uint8] | None:
        """Alpha channel of item `i`, [H, W] uint8 pixels of the bucket; None if the image is opaque.

        Raises:
            LatentStoreError: masks were not stored.
        """
        row = int(self._mask_row[i])
        if row == -1:
            return None
        if row < -1:
            raise LatentStoreError(
                f"{self.table['source'][i]} has no alpha mask: run `kohya-bucket precompute` again with --mask"
            )
        return self._checked_row(i, self._tensors(i)["alpha_mask"], row, _MASK)

    def gather(
        self, indices: Sequence[int] | npt.NDArray[Any], flipped: Sequence[bool] | None = None
    ) -> npt.NDArray[Any]:
        """Items of one bucket as one new array [B, C, h, w] (or [B, 2, C, h, w]) in their carrier type.

        Raises:
            LatentStoreError: the items have different shapes or types, or as `read`.
        """
        rows = [self.read(int(i), flipped=flipped is not None and bool(flipped[k])) for k, i in enumerate(indices)]
        first = rows[0]
        if any(row.shape != first.shape or row.dtype != first.dtype for row in rows):
            raise LatentStoreError(f"items of different shapes in one batch: {sorted({r.shape for r in rows})}")
        out = np.empty((len(rows), *first.shape), dtype=first.dtype)
        for k, row in enumerate(rows):
            out[k] = row
        return out

    def check(self, i: int) -> str | None:
        """What is wrong with the stored bytes of item `i`, or None. Reads all of them."""
        try:
            tensors = self._tensors(i)
            for name, array in tensors.items():
                role = _MASK if name == "alpha_mask" else _FLIPPED if name.endswith("_flipped") else _PLAIN
                row = int(self._mask_row[i] if role == _MASK else self._row[i])
                if row >= 0 and zlib.crc32(array[row].data) != int(self._crc[role][i]):
                    return f"checksum of {name} is wrong"
        except (LatentStoreError, OSError) as error:
            return str(error)
        return None

    def _checked_row(self, i: int, array: npt.NDArray[Any], row: int, role: int) -> npt.NDArray[Any]:
        out: npt.NDArray[Any] = array[row]
        if self.verify != "never" and not (self._checked[role, i] and self.verify == "first"):
            if zlib.crc32(out.data) != int(self._crc[role][i]):
                raise LatentStoreError(
                    f"{self.table['source'][i]}: its latent in shard {self.info(i).name} is damaged (checksum); "
                    "run `kohya-bucket cache repair`"
                )
            self._checked[role, i] = True
        return out

    def _tensors(self, i: int) -> dict[str, npt.NDArray[Any]]:
        key = int(self._shard[i])
        mapped = self._mapped.get(key)
        if mapped is None:
            info = self.info(i)
            try:
                mapped = MappedShard(self.layout.shards / info.name, info.nbytes, info.tensors)
            except FileNotFoundError as error:
                raise LatentStoreError(
                    f"shard {info.name} is gone from {self.layout.shards}: the store was packed or pruned meanwhile"
                ) from error
            self._mapped[key] = mapped
            if len(self._mapped) > _MAX_MAPPED:
                self._mapped.popitem(last=False)
        return mapped.tensors

    def with_texts(self, **changes: dict[int, str | None]) -> Any:
        """The store's rows with other captions or content hashes, by column and position."""
        pa, _, _ = arrow()
        table = self.table
        for name, changed in changes.items():
            texts = self.strings(name)
            for i, text in changed.items():
                texts[i] = text
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(texts, pa.string()))
        return table

    def storage(self, i: int) -> str:
        """Storage type of item `i`: "float32", "float16" or "bfloat16"."""
        return next(spec.dtype for name, spec in self.info(i).tensors.items() if name != "alpha_mask")

    def images_root(self) -> Path:
        return self.layout.images_root()


def _newest_in_order(table: Any) -> Any:
    """Of rows with the same key the one written last, in the order of (collection, source)."""
    pa, pc, _ = arrow()
    order = [("collection", "ascending"), ("source", "ascending"), ("written_ns", "ascending"), ("shard", "ascending")]
    plain = pa.table({name: table[name].cast(schema().field(name).type.value_type) if name in ("collection", "shard")
                      else table[name] for name, _ in order})  # fmt: skip
    at = pc.sort_indices(plain, sort_keys=order)
    table, plain = table.take(at), plain.take(at)
    if len(table) > 1:
        same = np.asarray(pc.equal(plain["source"][1:], plain["source"][:-1])) & np.asarray(
            pc.equal(plain["collection"][1:], plain["collection"][:-1])
        )
        if same.any():
            table = table.filter(pa.array(np.append(~same, True)))
    return table


def _dictionary(table: Any, name: str) -> list[str]:
    return list(table[name].combine_chunks().dictionary.to_pylist()) if len(table) else []


def _numbers(values: Any) -> npt.NDArray[Any]:
    return np.zeros(0, dtype=np.int32) if values is None else np.asarray(values)


def carrier_of(info: ShardInfo) -> np.dtype[Any]:
    """Carrier type of a shard's latents."""
    return carrier(next(spec.dtype for name, spec in info.tensors.items() if name != "alpha_mask"))
