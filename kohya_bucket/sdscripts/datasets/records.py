"""A dataset's image records as columns: sd-scripts keeps an object of about 900 bytes per image.

Forked workers share columns, where reading an object copies its page (reference counts are written to), and a
spawned worker is sent a few arrays instead of a pickle of all objects. A record is made anew each time it is
asked for, of sd-scripts' own type and with equal attributes; one that is written to is kept.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, MutableMapping, Sequence
from itertools import chain
from typing import Any

from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.sdscripts.datasets.columns import Few, column_of
from kohya_bucket.sdscripts.datasets.tables import BatchTable
from kohya_bucket.sdscripts.objects import Group, inner_of

__all__ = ["ImageColumns", "compact"]


def compact(group: Group) -> None:
    """Replace the image records of every dataset in `group` by columns; nothing that reads them notices."""
    for dataset in group.datasets:
        inner = inner_of(dataset)
        table, records = inner.buckets_indices, inner.image_data
        if isinstance(records, ImageColumns) and not records.changed:
            continue
        if not isinstance(table, BatchTable) or list(records) != list(table.images.keys):
            continue
        keys = TextColumn.of(table.images.keys)
        subsets = Few.of([inner.image_to_subset[key] for key in records], by_identity=True)
        infos = list(records.values())
        if subsets is None or len({type(info) for info in infos}) != 1 or set(inner.image_to_subset) - set(records):
            continue
        inner.image_data, inner.image_to_subset = ImageColumns(keys, infos), _Rows(keys, subsets)
        if dataset is not inner:  # a ControlNet dataset shares its inner one's records, and has no subsets of its own
            dataset.image_data = inner.image_data
    if isinstance(group.image_data, (dict, ChainMap)):
        # The group's own table is a dict that each dataset updates in turn, so the last one decides.
        group.image_data = ChainMap(*(dataset.image_data for dataset in reversed(group.datasets)))


class _Rows(MutableMapping[str, Any]):
    """A mapping from image keys to what a column holds; what is set or deleted later is remembered apart."""

    def __init__(self, keys: TextColumn, column: Any) -> None:
        self._keys = keys
        self._column = column
        self._later: dict[str, Any] = {}
        self._gone: set[str] = set()

    @property
    def changed(self) -> bool:
        """Whether anything was set or deleted."""
        return bool(self._later or self._gone)

    def __getitem__(self, key: str) -> Any:
        if self._later and key in self._later:
            return self._later[key]
        row = self._row(key)
        if row < 0 or key in self._gone:
            raise KeyError(key)
        return self._at(row)

    def __setitem__(self, key: str, value: Any) -> None:
        self._later[str(key)] = value
        self._gone.discard(key)

    def __delitem__(self, key: str) -> None:
        self[key]
        self._later.pop(key, None)
        self._gone.add(str(key))

    def __contains__(self, key: object) -> bool:
        return key in self._later or (isinstance(key, str) and key not in self._gone and self._row(key) >= 0)

    def __iter__(self) -> Iterator[str]:
        if not self.changed:
            return iter(self._keys)
        added = [key for key in self._later if self._row(key) < 0]
        return chain((key for key in self._keys if key not in self._gone), added)

    def __len__(self) -> int:
        return len(self._keys) if not self.changed else sum(1 for _ in self)

    def _at(self, row: int) -> Any:
        return self._column[row]

    def _row(self, key: str) -> int:
        row = getattr(key, "row", -1)
        if 0 <= row < len(self._keys) and self._keys[row] == key:
            return int(row)
        return int(self._keys.find([str(key)])[0])


class ImageColumns(_Rows):
    """`image_data`: N image records by key.

    Args:
        keys: [N] the image keys.
        infos: [N] sd-scripts' records, all of one type.
    """

    def __init__(self, keys: TextColumn, infos: Sequence[Any]) -> None:
        super().__init__(keys, None)
        self._type = type(infos[0])
        self._columns: dict[str, Any] = {}
        names = vars(infos[0]).keys()
        for name in names:
            self._columns[name] = column_of([vars(info).get(name) for info in infos], keys)
        # A record with attributes of its own is kept as it is.
        self._later.update((info.image_key, info) for info in infos if vars(info).keys() != names)

    def _at(self, row: int) -> Any:
        record = _record_type(self._type)()
        record.__dict__.update((name, column[row]) for name, column in self._columns.items())
        _set(record, "_home", self)
        return record


_TYPES: dict[type, type] = {}
_set = object.__setattr__


def _record_type(info_type: type) -> type:
    """A kind of `info_type` that tells its home when it is written to, and is made without arguments."""
    if info_type not in _TYPES:

        class ImageRecord(info_type):
            __slots__ = ("_home",)

            def __init__(self) -> None:
                pass

            def __setattr__(self, name: str, value: Any) -> None:
                _set(self, name, value)
                self._home[self.image_key] = self

            def __reduce__(self) -> tuple[Any, ...]:
                return _plain, (info_type, dict(self.__dict__))

        ImageRecord.__name__ = ImageRecord.__qualname__ = info_type.__name__
        _TYPES[info_type] = ImageRecord
    return _TYPES[info_type]


def _plain(info_type: type, attributes: dict[str, Any]) -> Any:
    """A record that is sent elsewhere is sd-scripts' own object there."""
    info: Any = object.__new__(info_type)
    info.__dict__.update(attributes)
    return info
