"""What a store's folder holds: the rows of its items, its shards, and what is unusable.

The manifest is only an index: every shard describes its own rows. Of two rows with one key the one with the greater
`SEQUENCE` counts, see docs/latent-format.md; if writers that commit at the same instant take the same number, the
shard whose name sorts last.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kohya_bucket.checks import digest
from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.images.arrow_files import arrow_of, numpy_of
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.entries import SEQUENCE, ItemTable, arrow, check_rows, decode, narrowed, schema
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.shards import ENTRIES, ShardInfo, read_header, stated_arrays
from kohya_bucket.latents.store.storage import RemotePath, StorePath, second_look
from kohya_bucket.texts import counted, some

_LOOKS = 5  # at a folder that others are changing
_AT_ONCE = 16  # requests to object storage
_ROWS = 1 << 13  # that are read before they are packed
_GONE = "gone"
Shards = dict[str, ShardInfo]


@dataclass
class Contents:
    """What a store's folder holds; see `LatentStore`.

    Attributes:
        table: rows of the items in usable shards; of each item the last written, by (collection, source).
        named: names of the shards in the manifest.
        away, away_rows: shards that are missing or truncated although the manifest has rows of them that nothing newer
            replaces, and these rows: their captions may be nowhere else, and the shards may come back.
        given_up: names of away shards that `prune --damaged` was told to do without.
    """

    table: Any
    shards: Shards = field(default_factory=dict)
    damage: list[tuple[str, str]] = field(default_factory=list)
    indexed: bool = False
    named: Set[str] = frozenset()
    away: Shards = field(default_factory=dict)
    away_rows: Any = None
    given_up: Set[str] = frozenset()


def contents_of(layout: Layout, seen: Shards, without: Set[str] = frozenset()) -> Contents:
    """Look at the folder, while other processes may add to it, pack or prune it.

    Args:
        seen: shards seen before, which are not parsed again.
        without: shards that do not count, since they are about to be removed.
    """
    pa, _, _ = arrow()
    pool = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())  # Arrow's own pools hold on to up to a third more
    try:
        return _contents_of(layout, seen, without)
    finally:
        pa.set_memory_pool(pool)


def _contents_of(layout: Layout, seen: Shards, without: Set[str]) -> Contents:
    _, pc, _ = arrow()
    contents = Contents(None)
    described: dict[str, ShardInfo | Exception] = {}  # shards that the manifest does not name, by their own words
    parts: list[dict[str, bytes]] = []  # their rows
    # Read the manifest, then the list of shards, until no shard came or went meanwhile. A packer writes new shards
    # before it removes old ones: so in an unchanged list every item is in some shard.
    for _ in range(_LOOKS):
        contents.damage.clear()
        manifest, named, in_order, contents.given_up = _newest_manifest(layout, seen, contents.damage)
        if described.keys() & named.keys():  # a newer manifest names them now
            described, parts = {}, []
        sizes = layout.shard_sizes()  # after the manifest, which could else name shards that are not listed
        unnamed = sorted(sizes.keys() - named.keys() - described.keys())
        _describe(layout, {name: sizes[name] for name in unnamed}, described, parts)
        if layout.shard_sizes() == sizes:
            break
    # Sort the shards into usable, damaged and missing ones; one of another length than the manifest says is missing,
    # too. A shard that has no rows in the manifest was packed or pruned, and is not missed.
    with_rows = set() if manifest is None else set(pc.unique(manifest["shard"]).to_pylist())
    missing = dict.fromkeys((named.keys() & with_rows) - sizes.keys(), _GONE)
    for name, nbytes in sorted(sizes.items()):
        if name in without:
            continue
        info = named.get(name) or described[name]
        if isinstance(info, Exception):
            if not isinstance(info, FileNotFoundError):  # one that vanished was written into others before
                contents.damage.append((name, str(info)))
        elif info.nbytes == nbytes or name not in named:
            contents.shards[name] = info
        else:
            missing[name] = f"{'truncated' if nbytes < info.nbytes else 'too long'}: {nbytes} bytes of {info.nbytes}"
    contents.named = named.keys()
    contents.indexed = manifest is not None and sizes.keys() <= contents.named
    # A manifest that covers everything is already in order.
    if in_order and not parts and not missing and not without:
        contents.table = manifest.unify_dictionaries()
        return contents
    # Else merge its rows with those of the unnamed shards, and keep those of missing shards aside.
    lost = manifest.filter(in_shards(manifest, missing)) if missing else None
    if manifest is not None:
        parts.append(_packed(manifest))
    del manifest
    contents.table = _newest_in_order(parts, contents.shards)
    if missing:
        _keep_missing(contents, missing, named, lost)
    return contents


def _keep_missing(contents: Contents, missing: dict[str, str], infos: Shards, lost: Any) -> None:
    """Report missing shards with the reason, and keep what the manifest says about them: `lost`, its rows of them."""
    rows = _not_replaced(contents.table, lost)
    sources_of: dict[str, list[str]] = {}
    for name, source in zip(rows["shard"].to_pylist(), rows["source"].to_pylist(), strict=True):
        sources_of.setdefault(name, []).append(source)
    for name, problem in sorted(missing.items()):
        sources = sources_of.get(name, [])
        if problem != _GONE or (sources and name not in contents.given_up):
            items = f"{counted(len(sources), 'item', 'is', 'are')} lost: {some(sources)}"
            contents.damage.append((name, f"{problem}; {items}"))
    contents.indexed &= sources_of.keys() == missing.keys()
    contents.away = {name: infos[name] for name in sorted(sources_of)}
    contents.away_rows = rows if sources_of else None


def _describe(
    layout: Layout, sizes: dict[str, int], described: dict[str, ShardInfo | Exception], parts: list[dict[str, bytes]]
) -> None:
    """Add to `described` what these shards say of themselves, or why that cannot be read, and their rows to `parts`,
    packed: many small tables would fragment memory. Object storage is asked for many at once."""
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
            described[name] = info
            waiting.append(rows)
            if turn == len(sizes) or sum(map(len, waiting)) > _ROWS:
                parts.append(_packed(pa.concat_tables(waiting).unify_dictionaries().combine_chunks()))
                waiting.clear()
                pa.default_memory_pool().release_unused()


def _packed(rows: Any) -> dict[str, bytes]:
    """Each column compressed, in Python's own memory: Arrow would scatter it over its pages."""
    pa, _, _ = arrow()
    options, packed = pa.ipc.IpcWriteOptions(compression="zstd"), {}
    for name in rows.column_names:
        column, stream = rows.select([name]), pa.BufferOutputStream()
        with pa.ipc.new_stream(stream, column.schema, options=options) as out:
            out.write_table(column)
        packed[name] = stream.getvalue().to_pybytes()
    return packed


def _unpacked(parts: list[dict[str, bytes]], name: str) -> Any:
    """One column of all parts, which is removed from them."""
    pa, _, _ = arrow()
    whole = pa.concat_tables([pa.ipc.open_stream(part.pop(name)).read_all() for part in parts])
    return whole[name].unify_dictionaries().combine_chunks()


def _not_replaced(table: Any, rows: Any) -> Any:
    """The `rows` whose items are not in `table`, or have a lower number there."""
    items, candidates = ItemTable(table), ItemTable(rows)
    keep = np.ones(len(rows), dtype=bool)
    for collection in candidates.collections():
        row = candidates.in_collection(collection)
        at = items.find(candidates.table["source"].take(arrow_of(row)).to_pylist(), collection)
        row, at = row[at >= 0], at[at >= 0]
        keep[row] = candidates.column(SEQUENCE)[row] > items.column(SEQUENCE)[at]
    return rows.take(arrow_of(np.flatnonzero(keep)))


def in_shards(table: Any, shards: Iterable[str]) -> Any:
    """[N] Arrow booleans: the rows in `shards`."""
    pa, pc, _ = arrow()
    return pc.is_in(table["shard"].cast(pa.string()), pa.array(list(shards), pa.string()))


class Index(NamedTuple):
    """A manifest's rows and shards, whether the rows are in the order of `Contents`, and the shards given up."""

    table: Any
    shards: Shards
    in_order: bool
    given_up: Set[str]


def _newest_manifest(layout: Layout, seen: Shards, damage: list[tuple[str, str]]) -> Index:
    """The newest manifest that can be read, or an empty one; unreadable ones are added to `damage`."""
    tried: set[StorePath] = set()
    while untried := [path for path in layout.manifests() if path not in tried]:
        path = untried[0]
        tried.add(path)
        try:
            return manifest_of(layout, path, seen)
        except FileNotFoundError:  # replaced since it was listed: the next list has its successor
            continue
        except LatentStoreError as error:
            damage.append((path.name, str(error)))
    return Index(None, {}, False, frozenset())


def manifest_of(layout: Layout, path: StorePath, seen: Shards) -> Index:
    """What a manifest says; shards in `seen` are not parsed again.

    Raises `LatentStoreError` if it is damaged, `FileNotFoundError` if it is gone, `UnreadableError` if it cannot be
    read now.
    """
    return second_look(path, lambda: _manifest_of(layout, path, seen))


def _manifest_of(layout: Layout, path: StorePath, seen: Shards) -> Index:
    with as_damage(f"manifest {path.name} is damaged"):
        table, description = decode(layout.read_manifest(path))
        infos = {}
        for stated in description["shards"]:
            name = stated["name"]
            infos[name] = seen.get(name) or ShardInfo.from_json(stated)
        check_rows(table, infos)
        return Index(table, infos, bool(description.get("in_order")), set(map(str, description.get("given_up", []))))


def self_described(layout: Layout, name: str, nbytes: int) -> tuple[Any, ShardInfo]:
    """Rows and description of a shard from its own file. Raises `LatentStoreError` if it is damaged,
    `FileNotFoundError` if it is gone, `UnreadableError` if it cannot be read now."""
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
            name, nbytes, specs, LatentSpace.from_json(description["space"]), stated_arrays(description)
        ).checked()
        # The rows do not name their own shard. Made from bytes, since `pa.array` imports pandas, see `numpy_of`.
        pa, _, _ = arrow()
        text = name.encode()
        word = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, len(text)], np.int32)), pa.py_buffer(text))
        column = pa.DictionaryArray.from_arrays(arrow_of(np.zeros(len(table), np.int32)), word)
        table = table.set_column(table.schema.get_field_index("shard"), "shard", column)
        if len(table) != info.rows:
            raise LatentStoreError(f"shard {name} is damaged: it holds {info.rows} items and describes {len(table)}")
        check_rows(table, {name: info})
    return table, info


def _newest_in_order(parts: list[dict[str, bytes]], shards: Shards) -> Any:
    """The rows of `parts` that lie in `shards`, by (collection, source); of those with one key the greatest number.

    Memory holds one unpacked column of all parts at a time, besides the sort keys.
    """
    pa, pc, _ = arrow()
    parts = parts or [_packed(schema().empty_table())]
    # Sort by key, then by number: the last row of each run of equal keys is the one that counts.
    keys = {name: _unpacked(parts, name) for name in ("source", "collection", SEQUENCE, "shard", "row")}
    codes = {name: numpy_of(keys[name].indices) for name in ("collection", "shard")}
    words = {name: np.array(keys[name].dictionary.to_pylist(), dtype=object) for name in codes}
    ranks = {name: np.unique(words[name], return_inverse=True)[1].astype(np.int32)[codes[name]] for name in codes}
    sortable = pa.table(keys | {name: arrow_of(rank) for name, rank in ranks.items()})
    by = ("collection", "source", SEQUENCE, "shard", "row")
    at = numpy_of(pc.sort_indices(sortable, sort_keys=[(name, "ascending") for name in by]))
    # Rows of other shards do not count.
    at = at[np.array([name in shards for name in words["shard"]], dtype=bool)[codes["shard"][at]]]
    del sortable, ranks
    # Bring one column after the other into that order, the sources first, which tell equal keys apart.
    columns: dict[str, Any] = {}
    for name in dict.fromkeys((*keys, "caption", *schema().names)):
        column = keys.pop(name) if name in keys else _unpacked(parts, name)
        pa.default_memory_pool().release_unused()
        columns[name] = narrowed(column.take(arrow_of(at)))
        del column
        if name == "source" and len(at) > 1:
            differs = numpy_of(pc.not_equal(columns[name][1:], columns[name][:-1]))
            last = np.flatnonzero(np.append(differs | (np.diff(codes["collection"][at]) != 0), True))
            if len(last) < len(at):
                at, columns[name] = at[last], columns[name].take(arrow_of(last))
            del codes
    return pa.table({name: columns[name] for name in schema().names})


@dataclass(frozen=True)
class Assigned:
    """Numbers and names that one process assigns to another, so that whoever does a piece of work writes the same.

    No number in the store exceeds `above`, and no other piece has this `key`.
    """

    above: int
    key: str

    def tag(self, number: int) -> str:
        """The ending of the name of the piece's shard of this number."""
        return digest(f"{self.key} {self.above} {number}")


class SequenceNumbers:
    """The greatest number in a store, as one writer sees it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: set[str] = set()
        self._greatest = 0

    def greatest(self, written: Iterable[str] = ()) -> int:
        """The greatest number in readable files now, apart from the shards that this writer has `written`; each file is
        read once."""
        self._seen.update(written)
        if not self._seen:
            index = _newest_manifest(self._layout, {}, [])
            if index.table is not None:
                self._count(index.table)
                self._seen.update(index.shards)
        for name, nbytes in self._layout.shard_sizes().items():
            if name not in self._seen:
                with suppress(LatentStoreError, FileNotFoundError):
                    self._count(self_described(self._layout, name, nbytes)[0])
                self._seen.add(name)  # only now: one that cannot be read at the moment is asked again
        return self._greatest

    def _count(self, table: object) -> None:
        _, pc, _ = arrow()
        self._greatest = max(self._greatest, pc.max(table[SEQUENCE]).as_py() or 0)  # type: ignore[index]
