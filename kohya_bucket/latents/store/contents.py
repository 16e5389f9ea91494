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
from typing import Any, NamedTuple

import numpy as np

from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.images.arrow_files import arrow_of, numpy_of
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.entries import ItemTable, arrow, check_rows, decode, narrowed, schema
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.shards import ENTRIES, ShardInfo, given_arrays, read_header
from kohya_bucket.latents.store.storage import RemotePath, StorePath, second_look
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
        away, away_rows: shards of which the manifest has rows that nothing newer replaces, and that are gone or cut
            off, and these rows: their captions may be nowhere else, and the shards may come back.
        given_up: names of those that `prune --damaged` was told to do without.
    """

    table: Any
    shards: Shards = field(default_factory=dict)
    damage: list[tuple[str, str]] = field(default_factory=list)
    indexed: bool = False
    named: Set[str] = frozenset()
    away: Shards = field(default_factory=dict)
    away_rows: Any = None
    given_up: Set[str] = frozenset()


def contents_of(layout: Layout, known: Shards, without: Set[str] = frozenset()) -> Contents:
    """Look at the folder, while other processes may add to it, pack or prune it.

    Args:
        known: shards seen before.
        without: shards that do not count, since they are about to be removed.
    """
    pa, _, _ = arrow()
    pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own keep up to a third more of what was let go of
    try:
        return _contents_of(layout, known, without)
    finally:
        pa.set_memory_pool(pool)


def _contents_of(layout: Layout, known: Shards, without: Set[str]) -> Contents:
    found = Contents(None)
    described: dict[str, ShardInfo | Exception] = {}
    parts: list[dict[str, bytes]] = []
    for _ in range(_LOOKS):
        found.damage.clear()
        manifest, named, in_order, found.given_up = _newest_manifest(layout, known, found.damage)
        if described.keys() & named.keys():  # it came meanwhile
            described, parts = {}, []
        sizes = layout.shard_sizes()  # after the manifest: a newer one could name shards that are not listed
        _describe(layout, {name: sizes[name] for name in sorted(sizes.keys() - named.keys() - described.keys())},
                  described, parts)  # fmt: skip
        if layout.shard_sizes() == sizes:  # or else one went, and what has its items now may not have been listed
            break
    # one without rows was packed or pruned
    missing = dict.fromkeys((named.keys() & _used(manifest)) - sizes.keys(), _GONE)
    for name, nbytes in sorted(sizes.items()):
        if name in without:
            continue
        info = named.get(name) or described[name]
        if isinstance(info, Exception):
            if not isinstance(info, FileNotFoundError):  # what is gone since was written into others before
                found.damage.append((name, str(info)))
        elif info.nbytes == nbytes or name not in named:
            found.shards[name] = info
        else:
            missing[name] = f"{'truncated' if nbytes < info.nbytes else 'too long'}: {nbytes} bytes of {info.nbytes}"
    found.named = named.keys()
    found.indexed = manifest is not None and sizes.keys() <= found.named
    if in_order and not parts and not missing and not without:
        found.table = manifest.unify_dictionaries()
        return found
    lost = {name: manifest.filter(in_shards(manifest, [name])) for name in missing}
    if manifest is not None:
        parts.append(_packed(manifest))
    del manifest
    found.table = _newest_in_order(parts, found.shards)
    _keep_in_mind(found, missing, {name: named[name] for name in missing}, lost)
    return found


def _used(manifest: Any) -> set[str]:
    """Names of the shards of which there are rows."""
    _, pc, _ = arrow()
    return set() if manifest is None else set(pc.unique(manifest["shard"]).to_pylist())


def _keep_in_mind(found: Contents, missing: dict[str, str], infos: Shards, lost: dict[str, Any]) -> None:
    """Say which shards are missing and why, and keep what the manifest knows of them."""
    pa, _, _ = arrow()
    kept = {}
    for name, problem in sorted(missing.items()):
        rows = _not_replaced(found.table, lost[name])
        if len(rows):
            kept[name] = rows
        if problem != _GONE or (len(rows) and name not in found.given_up):
            sources = rows["source"].to_pylist()
            found.damage.append(
                (name, f"{problem}; {counted(len(sources), 'item', 'is', 'are')} lost: {some(sources)}")
            )
    found.indexed &= kept.keys() == missing.keys()
    found.away = {name: infos[name] for name in kept}
    found.away_rows = pa.concat_tables(kept.values()) if kept else None


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


def _not_replaced(table: Any, rows: Any) -> Any:
    """Those of `rows` whose items `table` does not have, or has of a lower number."""
    items, listed = ItemTable(table), ItemTable(rows)
    keep = np.ones(len(rows), dtype=bool)
    for name in listed.collections():
        here = listed.in_collection(name)
        at = items.find(listed.table["source"].take(arrow_of(here)).to_pylist(), name)
        here, at = here[at >= 0], at[at >= 0]
        keep[here] = listed.column("written_ns")[here] > items.column("written_ns")[at]
    return rows.take(arrow_of(np.flatnonzero(keep)))


def in_shards(table: Any, shards: Iterable[str]) -> Any:
    """[N] Arrow booleans: the rows that lie in `shards`."""
    pa, pc, _ = arrow()
    return pc.is_in(table["shard"].cast(pa.string()), pa.array(list(shards), pa.string()))


class Index(NamedTuple):
    """What a manifest says: rows, shards, whether the rows are as `Contents` has them, and which shards are given
    up."""

    table: Any
    shards: Shards
    in_order: bool
    given_up: Set[str]


def _newest_manifest(layout: Layout, known: Shards, damage: list[tuple[str, str]]) -> Index:
    """The newest manifest that can be read; without one, nothing."""
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
    return Index(None, {}, False, frozenset())


def manifest_of(layout: Layout, path: StorePath, known: Shards) -> Index:
    """What a manifest says; `known`: shards seen before.

    Raises `LatentStoreError` where it cannot be used, `FileNotFoundError` where it is gone, and `UnreadableError` where
    it cannot be read now.
    """
    return second_look(path, lambda: _manifest_of(layout, path, known))


def _manifest_of(layout: Layout, path: StorePath, known: Shards) -> Index:
    with as_damage(f"manifest {path.name} is damaged"):
        table, description = decode(layout.read_manifest(path))
        infos = {}
        for stated in description["shards"]:
            name = stated["name"]
            infos[name] = known.get(name) or ShardInfo.from_json(stated)
        check_rows(table, infos)
        return Index(table, infos, bool(description.get("in_order")), set(map(str, description.get("given_up", []))))


def self_described(layout: Layout, name: str, nbytes: int) -> tuple[Any, ShardInfo]:
    """Rows and description of a shard, from its own file. Raises `LatentStoreError` where it is damaged,
    `FileNotFoundError` where it is gone, and `UnreadableError` where it cannot be read now."""
    return second_look(layout.shards / name, lambda: _self_described(layout, name, nbytes))


def _self_described(layout: Layout, name: str, nbytes: int) -> tuple[Any, ShardInfo]:
    specs, data, _ = read_header(layout.shards / name)
    with as_damage(f"shard {name} is damaged"):
        table, description = decode(data)
        for tensor, (dtype, shape) in description["tensors"].items():
            if tensor not in specs or (specs[tensor].dtype, list(specs[tensor].shape)) != (dtype, shape):
                raise LatentStoreError(f"shard {name} is damaged: its header and its entries disagree on {tensor!r}")
        del specs[ENTRIES]
        info = ShardInfo(
            name, nbytes, specs, LatentSpace.from_json(description["space"]), given_arrays(description)
        ).checked()
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
    """Numbers and names that one process gives another, so that any process that does the work writes the same files.

    Nothing in the store exceeds `above`, and no other work has this `key`.
    """

    above: int
    key: str

    def tag(self, number: int) -> str:
        """What the name of that shard of the work ends with."""
        return hashlib.blake2b(f"{self.key} {self.above} {number}".encode(), digest_size=8).hexdigest()


class SequenceNumbers:
    """The greatest number that others have taken in a store, as one writer sees it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: set[str] = set()
        self._greatest = 0

    def greatest(self, own: Iterable[str] = ()) -> int:
        """The greatest number on disk now, in files that can be read, besides a writer's own; each is read once."""
        self._seen.update(own)
        if not self._seen:
            index = _newest_manifest(self._layout, {}, [])
            if index.table is not None:
                self._count(index.table)
                self._seen.update(index.shards)
        for name, nbytes in self._layout.shard_sizes().items():
            if name not in self._seen:
                self._seen.add(name)
                with suppress(LatentStoreError, FileNotFoundError):
                    self._count(self_described(self._layout, name, nbytes)[0])
        return self._greatest

    def _count(self, table: object) -> None:
        _, pc, _ = arrow()
        self._greatest = max(self._greatest, pc.max(table["written_ns"]).as_py() or 0)  # type: ignore[index]
