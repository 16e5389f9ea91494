"""NovelAI's `{id: (width, height)}` pickle, without running what is in it.

A pickle is a program; reading a stranger's with `pickle.load` runs it. A mapping of sizes needs no names from any
module, so every request for one is refused, with the name, before anything is imported or called.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any, NoReturn

from kohya_bucket.errors import KohyaBucketError

__all__ = ["load_size_pickle"]


def load_size_pickle(path: str | Path) -> dict[Any, Any]:
    """The mapping in a pickle made of dicts, tuples, ints and strings only.

    Raises:
        KohyaBucketError: it holds, or asks for, anything else; names it. Or it is damaged.
    """
    try:
        data = _OnlyPlainValues(io.BytesIO(Path(path).read_bytes()), str(path)).load()
    except KohyaBucketError:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, OverflowError,
            MemoryError) as error:  # fmt: skip
        raise KohyaBucketError(f"{path} is damaged or no pickle: {type(error).__name__}: {error}") from None
    if type(data) is not dict:
        raise KohyaBucketError(f"{path} holds a {type(data).__name__}, but must be a dict of id: (width, height)")
    for key, size in data.items():
        _check(path, key)
        _check(path, size)
        for side in size if type(size) is tuple else ():
            _check(path, side)
    return data


class _OnlyPlainValues(pickle.Unpickler):
    """Knows no names, no persistent objects and no out-of-band buffers, so a pickle cannot reach any code."""

    def __init__(self, file: io.BytesIO, name: str) -> None:
        super().__init__(file)
        self._name = name

    def find_class(self, module: str, name: str) -> NoReturn:
        raise KohyaBucketError(
            f"{self._name} asks for {module}.{name}, which a table of sizes has no use for: refused, nothing was run. "
            f"Only dicts, tuples, ints and strings are read; write the table as CSV or JSON instead"
        )

    def persistent_load(self, pid: Any) -> NoReturn:
        raise KohyaBucketError(f"{self._name} asks for the persistent object {pid!r}: refused")


def _check(path: str | Path, value: Any) -> None:
    if type(value) not in (int, str, tuple):
        raise KohyaBucketError(
            f"{path} holds a {type(value).__name__} ({value!r:.40}): refused, "
            f"only dicts, tuples, ints and strings are read"
        )
