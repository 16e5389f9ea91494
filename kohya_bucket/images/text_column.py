"""A million texts without a million objects: one pool of bytes and one array of offsets.

A Python list of paths takes about 130 bytes per path, and every forked worker copies the pages it touches, because
reference counts change. This takes the bytes of the text plus 4, and is never written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from kohya_bucket.texts import is_whole

_ENCODING = ("utf-8", "surrogateescape")


class TextColumn(Sequence[str]):
    """N texts as columns; behaves like a read-only list of str. A slice is a list.

    Args:
        pool: all texts in UTF-8, concatenated: bytes.
        offsets: [N + 1], the beginning of each text, and the end of the last one.
    """

    def __init__(self, pool: bytes, offsets: npt.NDArray[np.integer[Any]]) -> None:
        self.pool = pool
        self.offsets = offsets.astype(np.uint32, copy=False) if len(pool) < 1 << 32 else offsets

    @classmethod
    def from_texts(cls, texts: Iterable[str]) -> TextColumn:
        """Pack texts; a `TextColumn` is returned unchanged."""
        if isinstance(texts, TextColumn):
            return texts
        listed = texts if isinstance(texts, list) else list(texts)
        joined = "".join(listed)
        parts = listed if joined.isascii() else [text.encode(*_ENCODING) for text in listed]
        offsets = np.zeros(len(listed) + 1, dtype=np.int64)
        np.cumsum(np.fromiter(map(len, parts), dtype=np.int64, count=len(parts)), out=offsets[1:])
        return cls(joined.encode(*_ENCODING), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return self._at(index)
        index = range(len(self))[index]
        return str(self.pool[int(self.offsets[index]) : int(self.offsets[index + 1])], *_ENCODING)

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), 4096):
            yield from self[start : start + 4096]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TextColumn):
            return NotImplemented
        return len(self) == len(other) and np.array_equal(self.offsets, other.offsets) and self.pool == other.pool

    __hash__ = None  # type: ignore[assignment]

    def take(self, rows: npt.NDArray[Any]) -> TextColumn:
        """The texts at `rows` (positions), in that order."""
        return TextColumn.from_texts(self._at(rows))

    def is_first(self) -> npt.NDArray[np.bool_]:
        """[N] bool: no earlier row holds the same text."""
        hashes, _ = self._index
        if (hashes[1:] != hashes[:-1]).all():
            return np.ones(len(self), dtype=bool)
        return np.asarray(self.find(self) == np.arange(len(self)))

    def is_unicode(self) -> npt.NDArray[np.bool_]:
        """[N] bool: the text is valid Unicode, unlike some file names."""
        try:
            str(self.pool, "utf-8")
        except UnicodeDecodeError:
            return np.array([is_whole(text) for text in self], dtype=np.bool_)
        return np.ones(len(self), dtype=np.bool_)

    def find(self, texts: Sequence[str]) -> npt.NDArray[np.int64]:
        """[M] int64: the first row that holds each of the M texts, -1 where none does."""
        rows = np.full(len(texts), -1, dtype=np.int64)
        if len(self) == 0 or len(texts) == 0:
            return rows
        hashes, order = self._index
        wanted = np.fromiter(map(hash, texts), dtype=np.int64, count=len(texts))
        at = np.searchsorted(hashes, wanted)
        likely = np.flatnonzero(hashes[np.minimum(at, len(hashes) - 1)] == wanted)
        candidates = order[at[likely]]
        for i, row, text in zip(likely.tolist(), candidates.tolist(), self._at(candidates), strict=True):
            # Two texts with the same 64-bit hash are so rare that a linear search is fast enough.
            rows[i] = row if text == texts[i] else next((k for k, packed in enumerate(self) if packed == texts[i]), -1)
        return rows

    def _at(self, rows: npt.NDArray[Any] | slice) -> list[str]:
        pool = self.pool
        starts, ends = self.offsets[:-1][rows].tolist(), self.offsets[1:][rows].tolist()
        return [str(pool[a:b], *_ENCODING) for a, b in zip(starts, ends, strict=True)]

    @cached_property
    def _index(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Sorted hashes and their rows; equal hashes in the order of rows."""
        hashes = np.fromiter(map(hash, self), dtype=np.int64, count=len(self))
        order = np.argsort(hashes, kind="stable")
        return hashes[order], order

    def __reduce__(self) -> tuple[Any, ...]:
        return TextColumn, (self.pool, self.offsets)  # without the hashes of texts, which differ between processes
