"""The smallest columns that give back equal values of the same types: one value, few, rows of numbers, texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.images.text_column import TextColumn

__all__ = ["Few", "column_of"]

_FEW = 256


def column_of(values: list[Any], keys: TextColumn) -> Any:
    """The smallest column that gives back equal values of the same types."""
    few = Few.of(values)
    if few is not None:
        return few if few.differ else Same(values[0])
    kinds = {type(value) for value in values}
    if kinds == {str}:
        texts = TextColumn.of(values)
        return keys if texts == keys else texts
    if len(kinds) == 1 and kinds <= {tuple, list}:
        numbers = Numbers.of(values, kinds.pop())
        if numbers is not None:
            return numbers
    return values


class Same:
    """One value for every image."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, _: int) -> Any:
        return self._value


class Few(Sequence[Any]):
    """N values of which at most 256 differ."""

    def __init__(self, codes: npt.NDArray[np.uint8], values: list[Any]) -> None:
        self._codes = codes
        self._values = values

    @classmethod
    def of(cls, values: list[Any], *, by_identity: bool = False) -> Few | None:
        """None if the values are too many, or cannot be compared."""
        seen: dict[Any, int] = {}
        kept: list[Any] = []
        codes = np.empty(len(values), dtype=np.uint8)
        for i, value in enumerate(values):
            mark = id(value) if by_identity else _mark(value)
            code = seen.get(mark) if mark is not None else None
            if code is None:
                code = len(kept)
                if mark is None or code == _FEW:
                    return None
                seen[mark] = code
                kept.append(value)
            codes[i] = code
        return cls(codes, kept)

    @property
    def differ(self) -> bool:
        """Whether not all are the same."""
        return len(self._values) > 1

    def __len__(self) -> int:
        return len(self._codes)

    def __getitem__(self, row: Any) -> Any:
        return self._values[self._codes[row]]


def _mark(value: Any) -> Any:
    """What equal values of one type share: True is not 1 and 0.0 is not 0. None if only `value` itself can tell."""
    kind = type(value)
    if kind in (str, int, bool, type(None)):
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind is tuple and all(type(part) is int for part in value):
        return kind, value
    return None


class Numbers(Sequence[Any]):
    """N tuples or lists of as many ints, or floats, each."""

    def __init__(self, rows: npt.NDArray[Any], kind: type) -> None:
        self._numbers = rows
        self._kind = kind

    @classmethod
    def of(cls, values: list[Any], kind: type) -> Numbers | None:
        """None if they are of several lengths or types."""
        parts = {type(part) for value in values for part in value}
        if len({len(value) for value in values}) != 1 or len(parts) != 1 or not parts <= {int, float}:
            return None
        try:
            rows = np.array(values, dtype=np.int64 if parts == {int} else np.float64)
        except OverflowError:
            return None
        if parts == {int} and (np.abs(rows) < 1 << 31).all():
            rows = rows.astype(np.int32)
        return cls(rows, kind)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, row: Any) -> Any:
        return self._kind(self._numbers[row].tolist())
