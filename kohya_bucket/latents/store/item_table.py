"""The items of a store as columns, found by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.latents.store.entries import StoreEntry, arrow, entry_at

__all__ = ["ItemTable"]

_AT_ONCE = 256  # rows of which one costs little more than a single one


class ItemTable:
    """N items, one row each.

    Attributes:
        table: Arrow table, see `entries.schema`; of each item the row written last, by (collection, source).
    """

    def __init__(self, table: Any) -> None:
        self.table = table

    def __len__(self) -> int:
        return len(self.table)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column of numbers, [N]."""
        return np.asarray(self.table[name].to_numpy())

    def strings(self, name: str) -> list[Any]:
        """A column of text, as a list of N strings (None where there is none)."""
        return list(self.table[name].to_pylist())

    def entry(self, i: int) -> StoreEntry:
        """What item `i` is."""
        return next(self.entries([i]))

    def entries(self, items: Iterable[int]) -> Iterator[StoreEntry]:
        """What each of these items is."""
        left = iter(items)
        while part := list(itertools.islice(left, _AT_ONCE)):
            yield from map(entry_at, self.table.take(np.array(part, dtype=np.int64)).to_pylist())

    def find(self, sources: Sequence[str], collection: str = "") -> npt.NDArray[np.int64]:
        """[M] positions of the items with these sources in `collection`; -1 where there is none."""
        pa, pc, _ = arrow()
        here = self.in_collection(collection)
        if not len(here):
            return np.full(len(sources), -1, dtype=np.int64)
        known = self.table["source"].take(pa.array(here)) if len(here) < len(self) else self.table["source"]
        found = pc.index_in(pa.array(sources, known.type), value_set=known.combine_chunks())
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

    def shard_numbers(self) -> npt.NDArray[np.int32]:
        """[N] position of each item's shard among the names of the shards that hold items, sorted."""
        shard = self.table["shard"].combine_chunks()
        names = np.array(shard.dictionary.to_pylist(), dtype=object)
        codes = np.asarray(shard.indices)
        used = np.flatnonzero(np.bincount(codes, minlength=len(names)))
        number = np.zeros(len(names), dtype=np.int32)
        number[used[np.argsort(names[used])]] = np.arange(len(used), dtype=np.int32)
        out: npt.NDArray[np.int32] = number[codes]
        return out

    def with_texts(self, **changes: dict[int, str | None]) -> Any:
        """The store's rows with other captions or content hashes, by column and position."""
        pa, _, _ = arrow()
        table = self.table
        for name, changed in changes.items():
            texts = self.strings(name)
            for i, text in changed.items():
                texts[i] = text
            table = table.set_column(table.schema.get_field_index(name), name, pa.array(texts, table[name].type))
        return table
