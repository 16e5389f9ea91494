"""What lies in a store's folder: the rows of its items, its shards, and what of it cannot be used.

The manifest is an index and nothing more: every shard describes its own rows. Of two rows with one key the one with the
greater number in `written_ns` counts, see docs/latent-format.md; writers that commit at the same instant may take the
same numbers, and then the row counts whose shard's name is the last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.images.arrow_files import arrow_of, numpy_of
from kohya_bucket.latents.architectures import LatentSpace
from kohya_bucket.latents.store.entries import ItemTable, arrow, check_rows, decode, narrowed, schema
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.shards import ENTRIES, ShardInfo, given_arrays, read_header
from kohya_bucket.latents.store.storage import RemotePath, StorePath
from kohya_bucket.texts import counted, some

_LOOKS = 5
_AT_ONCE = 16  # requests to object storage
_ROWS = 1 << 13  # read before they are packed
_GONE = "gone"
Shards = dict[str, ShardInfo]


@dataclass
class Contents:
    """What was found; see `LatentStore`.

    Attributes:
        table: rows of the items in usable shards; of each item the one written last, by (collection, source).
        named: names of the shards in the manifest.
    """

    table: Any
    shards: Shards = field(default_factory=dict)
    damage: list[tuple[str, str]] = field(default_factory=list)
    indexed: bool = False
    named: Set[str] = frozenset()


def contents_of(layout: Layout, known: Shards) -> Contents:
    """Look at the folder, while other processes may add to it, pack or prune it; `known`: shards seen before."""
    pa, _, _ = arrow()
    pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own keep up to a third more of what was let go of
    try:
        return _contents_of(layout, known)
    finally:
        pa.set_memory_pool(pool)


def _contents_of(layout: Layout, known: Shards) -> Contents:
    found = Contents(None)
    described: dict[str, ShardInfo | Exception] = {}
    parts: list[dict[str, bytes]] = []
    for _ in range(_LOOKS):
        found.damage.clear()
        manifest, named, in_order = _newest_manifest(layout, known, found.damage)
        if described.keys() & named.keys():  # it came meanwhile
            described, parts = {}, []
        sizes = layout.shard_sizes()  # after the manifest: a newer one could name shards that are not listed
        _describe(layout, {name: sizes[name] for name in sorted(sizes.keys() - named.keys() - described.keys())},
                  described, parts)  # fmt: skip
        if layout.shard_sizes() == sizes:  # or else one went, and what has its items now may not have been listed
            break
    missing = dict.fromkeys(named.keys() - sizes.keys(), _GONE)
    for name, nbytes in sorted(sizes.items()):
        info = named.get(name) or described[name]
        if isinstance(info, Exception):
            if not isinstance(info, FileNotFoundError):  # what is gone since was written into others before
                found.damage.append((name, str(info)))
        elif info.nbytes == nbytes or name not in named:
            found.shards[name] = info
        else:
            missing[name] = f"{'truncated' if nbytes < info.nbytes else 'too long'}: {nbytes} bytes of {info.nbytes}"
    found.named = named.keys()
    found.indexed = manifest is not None and found.named == sizes.keys()
    if in_order and not parts and not missing:
        found.table = manifest.unify_dictionaries()
        return found
    lost = {name: manifest.filter(in_shards(manifest, [name])) for name in missing}
    if manifest is not None:
        parts.append(_packed(manifest))
    del manifest
    found.table = _newest_in_order(parts, found.shards)
    for name, problem in sorted(missing.items()):
        sources = _not_in(found.table, lost[name])
        if sources or problem != _GONE:
            found.damage.append(
                (name, f"{problem}; {counted(len(sources), 'item', 'is', 'are')} lost: {some(sources)}")
            )
    return found


def _describe(layout: Layout, sizes: dict[str, int], found: dict[str, ShardInfo | Exception], parts: list[Any]) -> None:
    """What these shards say of themselves, or why that cannot be read, and their rows, see `_packed`: memory of many
    small tables stays in pieces. In object storage many are asked for at once."""
    pa, _, _ = arrow()

    def ask(name: str) -> tuple[Any, ShardInfo | Exception]:
        try:
            return self_described(layout, name, sizes[name])
        except (LatentStoreError, FileNotFoundError) as error:
            return schema().empty_table(), error

    waiting: list[Any] = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = zip(sizes, (pool.map if isinstance(layout.root, RemotePath) else map)(ask, sizes), strict=True)
        for turn, (name, (rows, info)) in enumerate(answers, 1):
            found[name] = info
            waiting.append(rows)
            if turn == len(sizes) or sum(map(len, waiting)) > _ROWS:
                parts.append(_packed(pa.concat_tables(waiting).unify_dictionaries().combine_chunks()))
                waiting.clear()
                pa.default_memory_pool().release_unused()


def _packed(rows: Any) -> dict[str, bytes]:
    """Each column compressed, in memory of Python's own: what Arrow keeps of this is scattered over its pages."""
    pa, _, _ = arrow()
    options, packed = pa.ipc.IpcWriteOptions(compression="zstd"), {}
    for name in rows.column_names:
        column, stream = rows.select([name]), pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, column.schema, options=options) as out:
            out.write_table(column)
        packed[name] = stream.getvalue().to_pybytes()
    return packed


def _unpacked(parts: list[dict[str, bytes]], name: str) -> Any:
    """A column of all parts, which are let go of."""
    pa, _, _ = arrow()
    whole = pa.concat_tables([pa.ipc.open_stream(part.pop(name)).read_all() for part in parts])
    return whole[name].unify_dictionaries().combine_chunks()


def _not_in(table: Any, rows: Any) -> list[str]:
    """Sources of `rows` whose items `table` does not have."""
    items, listed = ItemTable(table), ItemTable(rows)
    found: list[str] = []
    for name in listed.collections():
        sources = listed.table["source"].take(listed.in_collection(name)).to_pylist()
        found += [source for source, at in zip(sources, items.find(sources, name), strict=True) if at < 0]
    return found


def in_shards(table: Any, shards: Iterable[str]) -> Any:
    """[N] Arrow booleans: the rows that lie in `shards`."""
    pa, pc, _ = arrow()
    return pc.is_in(table["shard"].cast(pa.string()), pa.array(list(shards), pa.string()))


def _newest_manifest(layout: Layout, known: Shards, damage: list[tuple[str, str]]) -> tuple[Any, Shards, bool]:
    """Rows and shards of the newest manifest that can be read, and whether its rows are as `Contents` has them."""
    tried: set[StorePath] = set()
    while left := [path for path in layout.manifests() if path not in tried]:
        path = left[0]
        tried.add(path)
        try:
            return manifest_of(layout, path, known)
        except FileNotFoundError:  # replaced since it was listed, by one that is listed now
            continue
        except LatentStoreError as error:
            damage.append((path.name, str(error)))
    return None, {}, False


def manifest_of(layout: Layout, path: StorePath, known: Shards) -> tuple[Any, Shards, bool]:
    """Rows and shards of a manifest, and whether its rows are as `Contents` has them; `known`: shards seen before.

    Raises `LatentStoreError` where it cannot be used, and `FileNotFoundError` where it is gone.
    """
    with as_damage(f"manifest {path.name} is damaged"):
        table, description = decode(layout.read_manifest(path))
        infos = {}
        for stated in description["shards"]:
            name = stated["name"]
            infos[name] = known.get(name) or ShardInfo.from_json(stated)
        check_rows(table, infos)
        return table, infos, bool(description.get("in_order"))


def self_described(layout: Layout, name: str, nbytes: int) -> tuple[Any, ShardInfo]:
    """Rows and description of a shard, from its own file. Raises `LatentStoreError` where it is damaged, and
    `FileNotFoundError` where it is gone."""
    specs, data, _ = read_header(layout.shards / name)
    with as_damage(f"shard {name} is damaged"):
        table, description = decode(data)
        for tensor, (dtype, shape) in description["tensors"].items():
            if tensor not in specs or (specs[tensor].dtype, list(specs[tensor].shape)) != (dtype, shape):
                raise LatentStoreError(f"shard {name} is damaged: its header and its entries disagree on {tensor!r}")
        del specs[ENTRIES]
        info = ShardInfo(name, nbytes, specs, LatentSpace.of(description["space"]), given_arrays(description)).checked()
        pa, _, _ = arrow()
        text = name.encode()  # by its bytes: `pa.array` imports pandas, see `numpy_of`
        word = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, len(text)], np.int32)), pa.py_buffer(text))
        column = pa.DictionaryArray.from_arrays(arrow_of(np.zeros(len(table), np.int32)), word)
        table = table.set_column(table.schema.get_field_index("shard"), "shard", column)
        if len(table) != info.rows:
            raise LatentStoreError(f"shard {name} is damaged: it holds {info.rows} items and describes {len(table)}")
        check_rows(table, {name: info})
    return table, info


def _newest_in_order(parts: list[dict[str, bytes]], shards: Shards) -> Any:
    """Rows in `shards`, by (collection, source); of those with the same key the one of the greatest number.

    Of `parts`, see `_packed`, one column is unpacked after the other.
    """
    pa, pc, _ = arrow()
    parts = parts or [_packed(schema().empty_table())]
    keys = {name: _unpacked(parts, name) for name in ("source", "collection", "written_ns", "shard", "row")}
    codes = {name: numpy_of(keys[name].indices) for name in ("collection", "shard")}
    words = {name: np.array(keys[name].dictionary.to_pylist(), dtype=object) for name in codes}
    order = pa.table(keys | {
        name: arrow_of(np.unique(words[name], return_inverse=True)[1].astype(np.int32)[codes[name]]) for name in codes
    })  # fmt: skip
    by = ("collection", "source", "written_ns", "shard", "row")
    at = numpy_of(pc.sort_indices(order, sort_keys=[(name, "ascending") for name in by]))
    at = at[np.array([name in shards for name in words["shard"]], dtype=bool)[codes["shard"][at]]]
    del order
    columns: dict[str, Any] = {}
    for name in dict.fromkeys((*keys, "caption", *schema().names)):
        column = keys.pop(name) if name in keys else _unpacked(parts, name)
        pa.default_memory_pool().release_unused()
        columns[name] = narrowed(column.take(arrow_of(at)))
        del column
        if name == "source" and len(at) > 1:
            other = numpy_of(pc.not_equal(columns[name][1:], columns[name][:-1]))
            last = np.flatnonzero(np.append(other | (np.diff(codes["collection"][at]) != 0), True))
            if len(last) < len(at):
                at, columns[name] = at[last], columns[name].take(arrow_of(last))
            del codes
    return pa.table({name: columns[name] for name in schema().names})


@dataclass(frozen=True)
class Assigned:
    """Numbers and names that one process gives another, so that whoever does that work writes the same files.

    Nothing in the store exceeds `above`, and no other work has this `key`.
    """

    above: int
    key: str

    def tag(self, number: int) -> str:
        """What the name of that shard of the work ends with."""
        return hashlib.blake2b(f"{self.key} {self.above} {number}".encode(), digest_size=8).hexdigest()


class Generations:
    """The greatest number that others have taken in a store, as one writer sees it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: set[str] = set()
        self._greatest = 0

    def greatest(self, own: Iterable[str] = ()) -> int:
        """The greatest number on disk now, in files that can be read, besides a writer's own; each is read once."""
        self._seen.update(own)
        if not self._seen:
            table, shards, _ = _newest_manifest(self._layout, {}, [])
            if table is not None:
                self._count(table)
                self._seen.update(shards)
        for name, nbytes in self._layout.shard_sizes().items():
            if name not in self._seen:
                self._seen.add(name)
                with suppress(LatentStoreError, OSError):
                    self._count(self_described(self._layout, name, nbytes)[0])
        return self._greatest

    def _count(self, table: object) -> None:
        _, pc, _ = arrow()
        self._greatest = max(self._greatest, pc.max(table["written_ns"]).as_py() or 0)  # type: ignore[index]
