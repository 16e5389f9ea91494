"""Writing outputs of text encoders: a shard has one tensor for each array, of all its captions one after another."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.latent_space import LatentSpace
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.writer import StoreWriter
from kohya_bucket.latents.text.exact_arrays import Array, Packed

__all__ = ["SPANS", "TextWriter", "checksum"]

SPANS = "spans"  # [N, arrays, 3] int64: the first row in the array's tensor, how many rows, how many once unpacked


@dataclass
class _Group:
    """Captions whose arrays have the same names and types."""

    entries: list[StoreEntry] = field(default_factory=list)
    written_ns: list[int] = field(default_factory=list)
    items: list[dict[str, Packed]] = field(default_factory=list)
    nbytes: int = 0


class TextWriter(StoreWriter):
    """Adds captions' outputs to a store; otherwise as `StoreWriter`."""

    def __init__(self, root: str | os.PathLike[str], **options: Any) -> None:
        super().__init__(root, **options)
        self._groups: dict[object, _Group] = {}

    def __enter__(self) -> TextWriter:
        return self

    def add_text(self, entry: StoreEntry, arrays: Mapping[str, Packed], *, written_ns: int | None = None) -> None:
        """Add one caption.

        Args:
            entry: see `Caption.entry`.
            arrays: its outputs by name, packed.
            written_ns: the time that decides between two items of one key; now, if None.

        Raises:
            LatentStoreError: there are none, or one has the name of a part of the store.
        """
        if not arrays or SPANS in arrays or "entries" in arrays:
            raise LatentStoreError(
                f"outputs named {sorted(arrays)} cannot be stored: none, or a name of the store's own"
            )
        key = entry.collection, tuple((name, packed.layout) for name, packed in sorted(arrays.items()))
        group = self._groups.setdefault(key, _Group())
        group.entries.append(entry)
        group.written_ns.append(time.time_ns() if written_ns is None else written_ns)
        group.items.append(dict(sorted(arrays.items())))
        group.nbytes += sum(packed.bits.nbytes for packed in arrays.values())
        if group.nbytes >= self._shard_bytes:
            self._commit_group(key)
        elif self._flush_seconds is not None and time.monotonic() - self._flushed > self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Commit everything that is pending."""
        for key in list(self._groups):
            self._commit_group(key)
        super().flush()

    def _commit_group(self, key: object) -> None:
        group = self._groups.pop(key)
        names, n = list(group.items[0]), len(group.items)
        spans = np.empty((n, len(names), 3), dtype=carrier("int64"))
        tensors: dict[str, tuple[str, Array]] = {SPANS: ("int64", spans)}  # first: its length is the number of items
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
        places = {"written_ns": group.written_ns, "mask_row": [-2] * n, "crc_plain": crc, "crc_flipped": [0] * n,
                  "crc_mask": [0] * n}  # fmt: skip
        path = self.layout.new_shard((0, 0), "text")
        description = {"space": vars(LatentSpace(values="text", downsample_factor=1)), "arrays": given}
        self._write(path, group.entries, places, tensors, description, {"kind": "text"})


def checksum(spans: Array, bits: list[Array]) -> int:
    """CRC-32 of an item: how long its arrays are, then their bytes, by name. Where they lie is no part of it."""
    crc = zlib.crc32(np.ascontiguousarray(spans[:, 1:]).data)
    for array in bits:
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc
