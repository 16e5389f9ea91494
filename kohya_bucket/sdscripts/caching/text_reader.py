"""In place of a strategy's own reader of npz: the same arrays in the same order, from wherever they are."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.npz.read_write import write_arrays
from kohya_bucket.latents.text.exact_arrays import Array

__all__ = ["StrategyReader", "TextLoader", "with_npz"]

_PATTERN = np.arange(12, dtype=np.int16).reshape(4, 3)


class StrategyReader:
    """In which order a strategy's own reader returns arrays, found out with an npz of numbers in place of them."""

    def __init__(self, load: Callable[[str], Any]) -> None:
        self._load = load
        self.orders: dict[tuple[str, ...], list[str | None]] = {}

    def order(self, names: tuple[str, ...]) -> list[str | None]:
        """Names as the reader returns them; None where it returns that.

        Raises:
            LatentStoreError: it does more than that.
        """
        if names not in self.orders:
            marks = {name: _PATTERN + 100 * number for number, name in enumerate(names)}
            try:
                found = [None if value is None else np.asarray(value) for value in with_npz(marks, self._load)]
            except Exception as error:  # whatever a reader of one's own raises
                raise LatentStoreError(_refusal(names, f"{type(error).__name__}: {error}")) from error
            order = [None if value is None else _name_of(value, marks) for value in found]
            if "" in order:
                raise LatentStoreError(_refusal(names, "it changes them"))
            self.orders[names] = order
        return self.orders[names]


def _name_of(value: Array, marks: Mapping[str, Array]) -> str:
    """The name of the mark that this is, to the last bit, or an empty text."""
    same = (name for name, mark in marks.items() if value.dtype == mark.dtype and np.array_equal(value, mark))
    return next(same, "")


class Outputs(Protocol):
    """What knows outputs by the caption's key."""

    def load(self, key: str) -> dict[str, Array]: ...


@dataclass
class TextLoader:
    """In place of a strategy's `load_outputs_npz`; travels to spawned workers."""

    cache: Outputs
    orders: dict[tuple[str, ...], list[str | None]]

    def __call__(self, key: str) -> list[Array | None]:
        arrays = self.cache.load(key)
        return [None if name is None else arrays[name] for name in self.orders[tuple(sorted(arrays))]]


def with_npz(arrays: Mapping[str, Array], ask: Callable[[str], Any]) -> Any:
    """What `ask` says of the path of an npz with these arrays, which is gone then."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        path = str(Path(folder) / "outputs.npz")
        write_arrays(Path(path), dict(arrays), sync=False)
        return ask(path)


def _refusal(names: tuple[str, ...], why: str) -> str:
    return (
        f'text_cache = "shards" cannot give this sd-scripts its outputs ({", ".join(names)}): its reader does more '
        f'than return arrays of an npz ({why}). Use text_cache = "npz"'
    )
