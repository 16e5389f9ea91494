"""Writing outputs of text encoders: a shard has one tensor for each array, of all its captions one after another."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.latent_space import LatentSpace, carrier
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.shards import ENTRIES, MOST_AXES, MOST_UNPACKED, SPANS
from kohya_bucket.latents.store.writer import Pending, StoreWriter
from kohya_bucket.latents.text.exact_arrays import Array, Packed

__all__ = ["TextWriter", "check_outputs", "checksum"]

_OWN = {SPANS, ENTRIES, "__metadata__"}
_MOST_ARRAYS, _MOST_LETTERS = 256, 200  # so that a shard's header stays short


class _Kind(NamedTuple):
    """What the captions of one shard have in common."""

    collection: str
    layouts: tuple[tuple[str, object], ...]


@dataclass
class _Texts(Pending):
    items: list[dict[str, Packed]] = field(default_factory=list)


class TextWriter(StoreWriter):
    """Adds captions' outputs to a store; otherwise as `StoreWriter`."""

    def __enter__(self) -> TextWriter:
        return self

    def add_text(self, entry: StoreEntry, arrays: Mapping[str, Packed], *, written_ns: int | None = None) -> None:
        """Add one caption.

        Args:
            entry: see `Caption.entry`.
            arrays: its outputs by name, packed.
            written_ns: as for `add`.

        Raises:
            LatentStoreError: as `check_outputs`.
        """
        check_outputs(arrays)
        key = _Kind(entry.collection, tuple((name, packed.layout) for name, packed in sorted(arrays.items())))
        pending = self._enter(key, _Texts, entry, written_ns)
        pending.items.append(dict(sorted(arrays.items())))
        pending.nbytes += sum(packed.bits.nbytes for packed in arrays.values())
        self._commit_full(key)

    def _commit(self, common: Any, above: int) -> None:
        if not isinstance(common, _Kind):
            super()._commit(common, above)
            return
        group: _Texts = self._pending.pop(common)
        names, n = list(group.items[0]), len(group.items)
        spans = np.empty((n, len(names), 3), dtype=carrier("int64"))
        tensors: dict[str, tuple[str, Array]] = {SPANS: ("int64", spans)}
        given: dict[str, tuple[str, int]] = {}
        for at, name in enumerate(names):
            column = [item[name] for item in group.items]
            rows = np.array([len(packed.bits) for packed in column])
            spans[:, at, 0] = np.cumsum(rows) - rows
            spans[:, at, 1] = rows
            spans[:, at, 2] = [packed.length for packed in column]
            given[name] = column[0].given, column[0].axes
        # wide types first, so that each tensor begins at a multiple of its own
        for name in sorted(names, key=lambda name: -group.items[0][name].bits.itemsize):
            bits = np.concatenate([item[name].bits for item in group.items])
            tensors[name] = group.items[0][name].storage, bits
        crc = [checksum(spans[i], [item[name].bits for name in names]) for i, item in enumerate(group.items)]
        places = {"mask_row": [-2] * n, "crc_plain": crc, "crc_flipped": [0] * n, "crc_mask": [0] * n}
        space = LatentSpace(values="text", downsample_factor=1)
        path = self.layout.new_shard((0, 0), "text", self._generations.tag())
        self._write(path, group, above, places, tensors, space, {"kind": "text"}, given)


def check_outputs(arrays: Mapping[str, Packed]) -> None:
    """Refuse outputs that a store would not give again.

    Raises:
        LatentStoreError: there are none, or too many; one has the name of a part of the store, or is too large.
    """
    if not arrays or len(arrays) > _MOST_ARRAYS or _OWN & arrays.keys():
        raise LatentStoreError(
            f"outputs named {sorted(arrays)[:9]} cannot be stored: none, more than {_MOST_ARRAYS}, or a name of the "
            "store's own"
        )
    for name, packed in arrays.items():
        # each axis counts as 1 at least: see `check_shard`
        rest = math.prod(max(1, side) for side in packed.bits.shape[1:])
        widest = rest * max(8, packed.length * np.dtype(packed.given).itemsize)
        if packed.axes > MOST_AXES or widest > MOST_UNPACKED or len(name) > _MOST_LETTERS:
            raise LatentStoreError(
                f"an output {name[:_MOST_LETTERS]!r} of shape {[packed.length, *packed.bits.shape[1:]]} cannot be "
                f"stored: it has more than {MOST_AXES} axes or {MOST_UNPACKED:,} bytes, or too long a name"
            )


def checksum(spans: Array, bits: list[Array]) -> int:
    """CRC-32 of an item: how long its arrays are, then their bytes, by name. Where they lie is no part of it."""
    crc = zlib.crc32(np.ascontiguousarray(spans[:, 1:]).data)
    for array in bits:
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc
