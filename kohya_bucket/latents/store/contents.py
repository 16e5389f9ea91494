"""What lies in a store's folder: the rows of its items, its shards, and what of it cannot be used.

The manifest is an index and nothing more. Every shard describes its own rows, so shards that no manifest names
yet are read from their own description, and manifests that are lost, old or damaged cost time, never items.

Of two rows with one key the later is known by the store's own count of what was written into it. No clock says it: one
that runs ahead would make what it wrote newest for ever. A writer takes numbers above all that it sees on disk when it
commits, so whoever commits later has the greater ones. Writers that commit at the same instant may take the same
numbers; of these rows every reader takes the one whose shard's name is the last. A row that was not seen by who
replaced it is stale to the next run, which sees it and counts on from there. The numbers are in the column
`written_ns`, which held the time in nanoseconds before stores counted: those are numbers like any other, to be
exceeded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.latents.architectures import LatentSpace
from kohya_bucket.latents.remote.remote_path import RemotePath, StorePath
from kohya_bucket.latents.store.entries import arrow, check_rows, decode, schema
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.shards import ENTRIES, ShardInfo, given_arrays, read_header

__all__ = [
    "Assigned",
    "Contents",
    "Generations",
    "contents_of",
    "in_shards",
    "manifest_of",
    "self_described",
]

_LOOKS = 5
_AT_ONCE = 16  # requests to object storage
Shards = dict[str, ShardInfo]


@dataclass
class Contents:
    """What was found.

    Attributes:
        table: rows of the items in usable shards; of each item the one written last, by (collection, source).
        shards: usable shards by name.
        damage: (file name, what is wrong) of every shard or manifest that cannot be used.
        indexed: the manifest names all shards and no others.
        named: names of the shards in it.
    """

    table: Any
    shards: Shards = field(default_factory=dict)
    damage: list[tuple[str, str]] = field(default_factory=list)
    indexed: bool = False
    named: Set[str] = frozenset()


def contents_of(layout: Layout, known: Shards) -> Contents:
    """Look at the folder, while other processes may add to it, pack or prune it; `known`: shards seen before."""
    for _ in range(_LOOKS):
        found, whole = _look(layout, known)
        if whole:
            break
    return found


def in_shards(table: Any, shards: Shards) -> Any:
    """[N] Arrow booleans: the rows that lie in `shards`."""
    pa, pc, _ = arrow()
    return pc.is_in(table["shard"].cast(pa.string()), pa.array(list(shards), pa.string()))


def _look(layout: Layout, known: Shards) -> tuple[Contents, bool]:
    """What is there; False where a shard went meanwhile, so that those with its items may not have been listed yet."""
    found = Contents(None)
    manifest, from_manifest, in_order = _newest_manifest(layout, known, found.damage)
    found.named = from_manifest.keys()
    sizes = layout.shard_sizes()  # after the manifest: a newer one could name shards that are not listed
    found.indexed = manifest is not None and found.named == sizes.keys()
    parts = [] if manifest is None else [manifest]
    whole = True
    unknown = {name: nbytes for name, nbytes in sizes.items() if name not in from_manifest}
    describe = _describer(layout, unknown)
    for name, nbytes in sorted(sizes.items()):
        info = from_manifest.get(name)
        if info is not None and info.nbytes == nbytes:
            found.shards[name] = info
            continue
        if info is not None:
            problem = "truncated" if nbytes < info.nbytes else "too long"
            found.damage.append((name, f"{problem}: {nbytes} bytes of {info.nbytes}"))
            continue
        try:
            part, found.shards[name] = describe(name)
            parts.append(part)
        except FileNotFoundError:
            whole = False
        except LatentStoreError as error:
            found.damage.append((name, str(error)))
    if in_order and len(parts) == 1 and found.named <= found.shards.keys():
        found.table = parts[0].unify_dictionaries()
    else:
        found.table = _newest_in_order(parts, found.shards)
    return found, whole


def _describer(layout: Layout, sizes: dict[str, int]) -> Callable[[str], tuple[Any, ShardInfo]]:
    """`self_described` of these shards; in object storage many are asked for at once."""
    if not isinstance(layout.root, RemotePath) or len(sizes) < 2:
        return lambda name: self_described(layout, name, sizes[name])
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = {name: pool.submit(self_described, layout, name, nbytes) for name, nbytes in sizes.items()}
    return lambda name: answers[name].result()


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

    Raises:
        LatentStoreError: it cannot be used.
        FileNotFoundError: it is gone.
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
    """Rows and description of a shard, from its own file.

    Raises:
        LatentStoreError: it is damaged.
        FileNotFoundError: it is gone.
    """
    specs, data, _ = read_header(layout.shards / name)
    with as_damage(f"shard {name} is damaged"):
        table, description = decode(data)
        for tensor, (dtype, shape) in description["tensors"].items():
            if tensor not in specs or (specs[tensor].dtype, list(specs[tensor].shape)) != (dtype, shape):
                raise LatentStoreError(f"shard {name} is damaged: its header and its entries disagree on {tensor!r}")
        del specs[ENTRIES]
        info = ShardInfo(name, nbytes, specs, LatentSpace.of(description["space"]), given_arrays(description)).checked()
        pa, _, _ = arrow()
        column = pa.array([name] * len(table), schema().field("shard").type)
        table = table.set_column(table.schema.get_field_index("shard"), "shard", column)
        if len(table) != info.rows:
            raise LatentStoreError(f"shard {name} is damaged: it holds {info.rows} items and describes {len(table)}")
        check_rows(table, {name: info})
    return table, info


def _newest_in_order(parts: list[Any], shards: Shards) -> Any:
    """Rows in `shards`, by (collection, source); of those with the same key the one of the greatest number."""
    pa, pc, _ = arrow()
    table = pa.concat_tables(parts).unify_dictionaries() if parts else schema().empty_table()
    table = table.filter(in_shards(table, shards))
    keys = ("collection", "source", "written_ns", "shard", "row")
    order = [(name, "ascending") for name in keys]
    plain = pa.table({name: table[name].cast(schema().field(name).type.value_type) if name in ("collection", "shard")
                      else table[name] for name in keys})  # fmt: skip
    at = pc.sort_indices(plain, sort_keys=order)
    table, plain = table.take(at), plain.take(at)
    if len(table) > 1:
        same = np.asarray(pc.equal(plain["source"][1:], plain["source"][:-1])) & np.asarray(
            pc.equal(plain["collection"][1:], plain["collection"][:-1])
        )
        if same.any():
            table = table.filter(pa.array(np.append(~same, True)))
    return table


class Assigned:
    """Numbers and names that one process gives another, so that whoever does that work writes the same files.

    Args:
        above: a number that nothing in the store exceeds.
        key: names what is written; no other work has it.

    Attributes:
        shards: names of those that were written.
    """

    def __init__(self, above: int, key: str) -> None:
        self._above = above
        self._key = key
        self.shards: list[str] = []

    def greatest(self) -> int:
        return self._above

    def tag(self) -> str:
        return hashlib.blake2b(f"{self._key} {self._above} {len(self.shards)}".encode(), digest_size=8).hexdigest()

    def is_mine(self, name: str) -> None:
        self.shards.append(name)


class Generations:
    """The greatest number that others have taken in a store, as one writer sees it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: set[str] = set()
        self._greatest = 0

    def greatest(self) -> int:
        """The greatest number on disk now, in files that can be read; each is read once."""
        if not self._seen:
            self._look_at_the_manifest()
        for name, nbytes in self._layout.shard_sizes().items():
            if name not in self._seen:
                self._seen.add(name)
                with suppress(LatentStoreError, OSError):
                    self._count(self_described(self._layout, name, nbytes)[0])
        return self._greatest

    def tag(self) -> str:
        """What the next shard's name ends with; "" for what no other shard's does."""
        return ""

    def is_mine(self, name: str) -> None:
        """Leave out a shard that this writer is about to write: it knows its own numbers."""
        self._seen.add(name)

    def _look_at_the_manifest(self) -> None:
        for path in self._layout.manifests():
            with suppress(LatentStoreError, OSError):
                table, shards, _ = manifest_of(self._layout, path, {})
                self._count(table)
                self._seen.update(shards)
                return

    def _count(self, table: object) -> None:
        _, pc, _ = arrow()
        self._greatest = max(self._greatest, pc.max(table["written_ns"]).as_py() or 0)  # type: ignore[index]
