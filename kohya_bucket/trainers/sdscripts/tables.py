"""Replacements for the two tables that sd-scripts' datasets look batches up in.

`BaseDataset.__getitem__(index)` asks `self.buckets_indices[index]` which slice of which bucket to train and
then `self.bucket_manager.buckets[...]` for the image keys. Both also accept a `PlannedBatch`, an
index that carries its images and its epoch with it, so that no worker needs state that could be late.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.planning import EpochPlan, EpochPlanner, EpochPosition
from kohya_bucket.planning.plan import BucketCounts
from kohya_bucket.trainers.door.batches import ImageKey, PlannedBatch
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import PlacedDataset
from kohya_bucket.trainers.sdscripts.carried import ResizedSize
from kohya_bucket.trainers.sdscripts.objects import Group, HeldDataset, inner_of


class KeyTable(Sequence[list[str]]):
    """`bucket_manager.buckets`: per bucket the image keys, each as often as it repeats.

    Nothing is stored but one array of image numbers, sorted by bucket. An image with several resolutions stands in
    one bucket of each.
    """

    def __init__(self, images: PlacedDataset) -> None:
        self._keys = images.keys
        order, ids = images.pairs
        self._order = order.astype(np.int32)
        self._repeats = images.repeats
        self._starts = np.searchsorted(ids, np.arange(len(images.buckets) + 1))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, PlannedBatch):
            return self._named(index.images)
        k = range(len(self))[index]
        images = self._order[self._starts[k] : self._starts[k + 1]]
        return self._named(np.repeat(images, self._repeats[images]))

    def _named(self, images: npt.NDArray[np.int32]) -> list[str]:
        keys: list[str] = []
        for row in images.tolist():
            key = ImageKey(self._keys[row])
            key.row = row
            keys.append(key)
        return keys


class BatchTable(Sequence[Any]):
    """`buckets_indices`: one entry per batch of an epoch on one process.

    A plain integer is answered from the plan of the dataset's current epoch, so that code which walks a
    dataset by number (sd-scripts' dataset preview does) sees each epoch's batches once, in a new order.

    Args:
        make_entry: sd-scripts' own entry type, called with bucket index, batch size, batch number.
        clock: the dataset, whose `seed` and `current_epoch` say which epoch's plan is asked for.
    """

    def __init__(
        self, images: PlacedDataset, make_entry: Callable[[Any, int, int], Any], clock: HeldDataset,
        options: AdapterOptions,
    ) -> None:  # fmt: skip
        self.images, self.options = images, options
        self._make_entry, self._clock = make_entry, clock

    @cached_property
    def _planner(self) -> EpochPlanner:
        return GroupPlanner([self.images], self.options.unscheduled()).planner(1)

    def _plan(self) -> EpochPlan:
        return self._planner.plan_at(EpochPosition(int(self._clock.seed), int(self._clock.current_epoch)))

    @property
    def counts(self) -> BucketCounts:
        """What the epoch trains of each bucket."""
        return self._plan().per_bucket()

    def __len__(self) -> int:
        return self._plan().steps

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, PlannedBatch):
            plan = self._plan()
            at = range(plan.steps)[index]
            bucket = int(plan.bucket_of_step[at])
            index = PlannedBatch(at, plan.epoch, 0, plan.indices(at, 0), int(self._clock.seed), bucket)
        return self._make_entry(index, len(index.images), 0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_planner"}


# A dataset's image records as columns: sd-scripts keeps an object of about 900 bytes per image.
#
# Forked workers share columns, where reading an object copies its page (reference counts are written to), and a
# spawned worker is sent a few arrays instead of a pickle of all objects. A record is made each time it is
# asked for, of sd-scripts' own type and with equal attributes; one that is written to is kept.


def compact(group: Group) -> None:
    """Replace the image records of every dataset in `group` by columns; nothing that reads them notices."""
    for dataset in group.datasets:
        inner = inner_of(dataset)
        table, records = inner.buckets_indices, inner.image_data
        if isinstance(records, ImageColumns) and not records.changed:
            continue
        # Rows of columns are the table's: where sd-scripts' records are not in its order, they stay as they are.
        if not isinstance(table, BatchTable) or list(records) != list(table.images.keys):
            continue
        keys = TextColumn.from_texts(table.images.keys)
        subsets = Few.from_values([inner.image_to_subset[key] for key in records], by_identity=True)
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
        self[key]  # KeyError where it is not
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
        self._type, names = type(infos[0]), vars(infos[0]).keys()
        self._columns = {name: column_of([vars(info).get(name) for info in infos], keys) for name in names}
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


_FEW = 256


def column_of(values: list[Any], keys: TextColumn) -> Any:
    """The smallest column that gives back equal values of the same types."""
    few = Few.from_values(values)
    if few is not None:
        return few
    # All texts, all sizes, or all rows of as many small whole numbers; anything else stays a list.
    kinds = {type(value) for value in values}
    if kinds == {str}:
        texts = TextColumn.from_texts(values)
        return keys if texts == keys else texts
    if ResizedSize in kinds and kinds <= {tuple, ResizedSize}:
        rows = list(map(ResizedSize.row_of, values))
        return Numbers(np.array(rows, dtype=np.int32), ResizedSize.from_row)
    if kinds not in ({tuple}, {list}) or len({len(row) for row in values}) > 1:
        return values
    numbers = np.array(values) if {type(part) for row in values for part in row} == {int} else np.empty(0)
    small = numbers.dtype.kind == "i" and (np.abs(numbers) < 1 << 31).all()
    return Numbers(numbers.astype(np.int32), *kinds) if small else values


@dataclass
class Few:
    """N values of which at most 256 differ; without codes they are all the same."""

    codes: npt.NDArray[np.uint8] | None
    values: list[Any]

    @classmethod
    def from_values(cls, values: list[Any], *, by_identity: bool = False) -> Few | None:
        """None if the values are too many, or cannot be compared."""
        kept: dict[Any, tuple[int, Any]] = {}
        codes = np.empty(len(values), dtype=np.uint8)
        for i, value in enumerate(values):
            mark = id(value) if by_identity else _mark(value)
            code = kept.setdefault(mark, (len(kept), value))[0]
            if mark is None or code == _FEW:
                return None
            codes[i] = code
        return cls(codes if len(kept) > 1 else None, [value for _, value in kept.values()])

    def __getitem__(self, row: int) -> Any:
        return self.values[0 if self.codes is None else self.codes[row]]


def _mark(value: Any) -> Any:
    """What equal values of one type share: True is not 1 and 0.0 is not 0. None if only `value` itself can tell."""
    kind = type(value)
    if kind is float:
        return kind, value.hex()
    plain = kind in (str, int, bool, type(None)) or (kind is tuple and all(type(part) is int for part in value))
    return (kind, value) if plain else None


@dataclass
class Numbers:
    """N tuples or lists of as many ints each."""

    rows: npt.NDArray[np.int32]
    kind: Callable[[list[int]], Any]

    def __getitem__(self, row: int) -> Any:
        return self.kind(self.rows[row].tolist())
