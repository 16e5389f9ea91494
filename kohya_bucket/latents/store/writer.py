"""Writing into a store: rows gather per bucket, and a full shard becomes one file under a unique name.

Any number of writers, in any number of processes and on any number of machines, need no lock: no writer touches a file
of another.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.latents.finite import all_finite
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.contents import Assigned, SequenceNumbers
from kohya_bucket.latents.store.entries import (
    FORMAT,
    OPAQUE,
    SEQUENCE,
    WITHOUT_MASKS,
    Columns,
    StoreEntry,
    arrow,
    encode,
    schema,
    table_of_rows,
)
from kohya_bucket.latents.store.exact_arrays import Packed, check_outputs, checksum, joined
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout, content_of, is_text
from kohya_bucket.latents.store.shards import SPANS, ShardInfo, write_shard
from kohya_bucket.latents.store.storage import StorePath, write_new

Bits = npt.NDArray[Any]
OF_A_SHARD = ("bucket_width", "bucket_height", "dtype", "kind", "flip", "mask", "collection")


_TEXT_SPACE = LatentSpace(values="text", downsample_factor=1)


@dataclass
class _Pending:
    """Rows that wait to be written as one shard, and what they have in common."""

    content: Callable[[_Pending], _Content]
    bucket_size: tuple[int, int] = (0, 0)
    dtype: str = "text"
    space: LatentSpace = _TEXT_SPACE
    rows: list[Columns] = field(default_factory=list)
    numbers: list[int | None] = field(default_factory=list)  # None: assigned when the shard is written
    turns: list[int] = field(default_factory=list)  # of this writer, in the order in which rows were added
    nbytes: int = 0
    latents: dict[str, list[Bits]] = field(default_factory=dict)  # by tensor
    masks: list[Bits] = field(default_factory=list)
    mask_rows: list[int] = field(default_factory=list)
    texts: list[dict[str, Packed]] = field(default_factory=list)


class StoreWriter:
    """Adds items to a store. Use as a context manager; leaving it commits what is pending.

    Args:
        root: the store's folder, made if missing.
        images_root: folder that the sources' paths start from; remembered when the store is made.
        shard_bytes: a shard is committed when its tensors reach this size.
        flush_seconds: everything pending is committed after this time, so that a crash loses little; None waits for
            full shards.
        assigned: numbers and names from elsewhere: an existing shard of such a name has the same items, and stays where
            it cannot be replaced. None: this writer takes its own.

    Attributes:
        shards: names of the shards it has written.

    Raises:
        LatentStoreError: the folder cannot be written, or the disk is full. What was committed stays.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        images_root: Path | None = None,
        shard_bytes: int = 256 << 20,
        flush_seconds: float | None = 60.0,
        assigned: Assigned | None = None,
    ) -> None:
        self.layout = Layout(root)
        self.layout.create(images_root)
        self._shard_bytes = shard_bytes
        self._flush_seconds = flush_seconds
        self._pending: dict[tuple[Any, ...], _Pending] = {}  # by what the rows of a shard have in common
        self._assigned, self._sequence_numbers = assigned, SequenceNumbers(self.layout)
        self.shards: list[str] = []
        self._added = 0
        self._flushed = time.monotonic()

    def add(
        self,
        entry: StoreEntry,
        plain: Bits,
        *,
        flipped: Bits | None = None,
        mask: npt.NDArray[np.uint8] | None = None,
        space: LatentSpace,
        sequence: int | None = None,
    ) -> None:
        """Add one item: `add_rows` without the first axis."""
        flips = None if flipped is None else flipped[None]
        numbers = None if sequence is None else [sequence]
        self.add_rows(entry.rows(), plain[None], flipped=flips, masks=[mask], space=space, numbers=numbers)

    def add_rows(
        self,
        rows: Columns,
        plain: Bits,
        *,
        flipped: Bits | None = None,
        masks: Sequence[Bits | None] | None = None,
        space: LatentSpace,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """Add items of one bucket, type, kind and collection.

        Args:
            rows: columns of B rows, see `table_of_rows`; they state dtype, kind, flip and mask.
            plain: [B, C, h, w] latents or [B, 2, C, h, w] mean and standard deviation, in the dtype's carrier type.
            flipped: the same for the mirrored images.
            masks: B alpha channels [H, W] in pixels of the bucket, None for an opaque image; None: not stored.
            space: what the numbers mean.
            numbers: decide between two items of one key, see `SequenceNumbers`; None: above all numbers in the store
                when this is committed.
        """
        common = tuple(rows[name][0] for name in OF_A_SHARD)
        _check_collection(rows["collection"][0])
        width, height, dtype, kind, flip, mask, _ = common
        masks = [None] * len(plain) if masks is None else masks
        if flip != (flipped is not None):
            raise ValueError(f"{rows}: flip is {flip}")
        key = *common, plain.shape[1:], space
        pending = self._pending.setdefault(key, _Pending(_latents, (int(width), int(height)), dtype, space))
        for name, part in ((kind, plain), (f"{kind}_flipped", flipped)):
            if part is not None:
                pending.latents.setdefault(name, []).append(part)
        for alpha in masks:
            if not mask:
                pending.mask_rows.append(WITHOUT_MASKS)
            elif alpha is None:
                pending.mask_rows.append(OPAQUE)
            else:
                pending.mask_rows.append(len(pending.masks))
                pending.masks.append(alpha)
        self._append(key, rows, len(plain), numbers, (plain, flipped, *masks))

    def add_text(self, entry: StoreEntry, arrays: Mapping[str, Packed], *, sequence: int | None = None) -> None:
        """Add a caption.

        Args:
            entry: see `Caption.entry`.
            arrays: its packed outputs by name.
            sequence: its number, see `add_rows`.

        Raises:
            LatentStoreError: NaN or infinity, or see `check_outputs`.
        """
        check_outputs(arrays)
        if not all(all_finite(packed.bits) for packed in arrays.values()):
            raise LatentStoreError(f"{entry.caption!r}: what text encoders make of it is not finite (NaN or infinity)")
        _check_collection(entry.collection)
        item = dict(sorted(arrays.items()))
        key = entry.collection, tuple((name, packed.layout) for name, packed in item.items())
        self._pending.setdefault(key, _Pending(_texts)).texts.append(item)
        numbers = None if sequence is None else [sequence]
        self._append(key, entry.rows(), 1, numbers, [packed.bits for packed in item.values()])

    def _append(
        self, key: tuple[Any, ...], rows: Columns, n: int, numbers: Sequence[int] | None, bits: Iterable[Bits | None]
    ) -> None:
        pending = self._pending[key]
        pending.rows.append(rows)
        pending.numbers += [None] * n if numbers is None else numbers
        pending.turns += range(self._added + 1, self._added + 1 + n)
        self._added += n
        pending.nbytes += sum(part.nbytes for part in bits if part is not None)
        if pending.nbytes >= self._shard_bytes:
            self._commit(key, self._greatest([key]))
        elif self._flush_seconds is not None and time.monotonic() - self._flushed > self._flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Commit everything that is pending."""
        above = self._greatest(self._pending)
        for key in list(self._pending):
            self._commit(key, above)
        self._flushed = time.monotonic()

    def _greatest(self, keys: Iterable[tuple[Any, ...]]) -> int:
        if self._assigned is not None:
            return self._assigned.above
        unnumbered = any(None in self._pending[key].numbers for key in keys)
        return self._sequence_numbers.greatest(self.shards) if unnumbered else 0

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()
            return
        with suppress(KohyaBucketError):  # keep what is finished; the first error is the one to report
            self.flush()

    def _commit(self, key: tuple[Any, ...], above: int) -> None:
        pending = self._pending.pop(key)
        tag = "" if self._assigned is None else self._assigned.tag(len(self.shards))
        path = self.layout.new_shard(pending.bucket_size, pending.dtype, tag)
        self.shards.append(path.name)
        content, turns = pending.content(pending), zip(pending.numbers, pending.turns, strict=True)
        # Above every number in the store: whichever of two rows of one item was written later counts.
        numbers = [above + turn if number is None else number for number, turn in turns]
        n, places = len(numbers), {SEQUENCE: numbers, "row": range(len(numbers))} | content.columns
        unused = {"shard": path.name, "mask_row": WITHOUT_MASKS, "crc_flipped": 0, "crc_mask": 0}
        rows = table_of_rows(pending.rows, {name: [value] * n for name, value in unused.items()} | places)
        shapes = {name: [dtype, list(bits.shape)] for name, (dtype, bits) in content.tensors.items()}
        entries = encode(rows, {"tensors": shapes, "space": vars(pending.space)} | content.description)
        # What lies under an assigned name was written by another process for the same piece, and says the same.
        try:
            with suppress(*([FileExistsError] if self._assigned else [])):
                write_shard(path, content.tensors, entries, {"format": FORMAT} | content.note)
        except KeyboardInterrupt:  # whoever is interrupted may flush once more
            self._pending[key] = pending
            self.shards.remove(path.name)
            raise


def _check_collection(name: Any) -> None:
    """Raise `LatentStoreError` for a name that rows cannot hold, and that would count as damage where they are read."""
    if not is_text(name):
        raise LatentStoreError(f"collection is {name!r}, but must be a text of Unicode, without zeros in it")


class _Content(NamedTuple):
    """What rows become in a shard: tensors with their storage types, more columns of the rows, what both mean."""

    tensors: dict[str, tuple[str, Bits]]
    columns: dict[str, Any]
    description: dict[str, Any]
    note: dict[str, str]


def _texts(pending: _Pending) -> _Content:
    tensors, arrays = joined(pending.texts)
    spans = tensors[SPANS][1]
    crc = [checksum(spans[i], [packed.bits for packed in item.values()]) for i, item in enumerate(pending.texts)]
    return _Content(tensors, {"crc_plain": crc}, {"arrays": arrays}, {"kind": "text"})


def _latents(pending: _Pending) -> _Content:
    whole = {name: np.concatenate(parts) for name, parts in pending.latents.items()}
    columns = dict(zip(("crc_plain", "crc_flipped"), map(_checksums, whole.values()), strict=False))
    tensors = {name: (pending.dtype, bits) for name, bits in whole.items()}
    if pending.masks:
        tensors["alpha_mask"] = ("uint8", np.stack(pending.masks))
    masks, (width, height) = _checksums(pending.masks), pending.bucket_size
    columns["crc_mask"] = [masks[row] if row >= 0 else 0 for row in pending.mask_rows]
    return _Content(tensors, columns | {"mask_row": pending.mask_rows}, {}, {"bucket": f"{width}x{height}"})


def _checksums(rows: Iterable[Bits]) -> list[int]:
    return [zlib.crc32(np.ascontiguousarray(row).data) for row in rows]


def write_manifest(
    store: LatentStore, table: Any = None, *, emptied: Iterable[ShardInfo] = (), given_up: Iterable[str] = ()
) -> StorePath | None:
    """Index all shards of an open store in a new manifest, written twice, and remove the manifests it replaces.

    Captions that are newer than their latents are nowhere else. So the manifest is written twice, and damage to one
    copy loses nothing; and the rows of shards that are away stay in it.

    Args:
        table: the rows to index instead of the store's own, e.g. with other captions.
        emptied: shards that are about to be removed; their rows no longer count, whatever interrupts the removal.
        given_up: shards that are away, and no longer reported as damage.

    Returns the newer one; None if two manifests already say the same. Raises as `write_new`.
    """
    older = store.layout.manifests()
    same = len(older) == 2 and content_of(older[0]) == content_of(older[1])
    emptied, missed = list(emptied), sorted((set(given_up) | store.given_up) & store.away.keys())
    news = emptied or table is not None or store.damage or missed != sorted(store.given_up)
    if store.indexed and same and not news:
        return None
    infos = [*store.shards.values(), *store.away.values(), *emptied]
    description: dict[str, Any] = {"shards": [info.to_json() for info in infos], "in_order": not store.away}
    if missed:
        description["given_up"] = missed
    rows = store.table if table is None else table
    if store.away:
        rows = arrow()[0].concat_tables([part.cast(schema()) for part in (rows, store.away_rows)])
    data = encode(rows, description)
    for _ in range(2):
        path = store.layout.new_manifest(data)
        write_new(path, [data])
    # Only now: whatever interrupts this, a whole manifest is there.
    for old in older:
        with suppress(OSError):
            old.unlink()
    return path
