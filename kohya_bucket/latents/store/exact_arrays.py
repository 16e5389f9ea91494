"""An array in as few bytes as its values allow, restored bit for bit: see docs/latent-format.md.

float32 values whose lower halves are all zero are stored as bfloat16, and identical rows at the end are stored once.
Such rows need not be zeros: a T5 that masks padding repeats one row from 128 tokens behind the caption on.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.dtypes import carrier, to_float32
from kohya_bucket.latents.store.shards import ENTRIES, MOST_AXES, MOST_UNPACKED, SPANS

Array = npt.NDArray[Any]


class DamagedItemError(LatentStoreError):
    """The bytes of an item are not those that were written."""


@dataclass(frozen=True)
class Packed:
    """An array as it is stored.

    Attributes:
        bits: [rows, ...] in the carrier type of `storage`. The last row stands for all that follow.
        storage: storage type, one of `latents.dtypes.CODES`.
        numpy_type: of the array, such as `<f4`.
        axes: number of axes; an array without axes is stored as one row.
        length: its length along the first axis.
    """

    bits: Array
    storage: str
    numpy_type: str
    axes: int
    length: int

    @property
    def layout(self) -> tuple[str, str, int, tuple[int, ...]]:
        """What all arrays in one tensor have in common."""
        return self.storage, self.numpy_type, self.axes, self.bits.shape[1:]


def pack(array: Array) -> Packed:
    """Pack an array of floats, integers or bools, of any shape. Raises `LatentStoreError` for another type and for
    numbers beyond int64."""
    array = np.asarray(array)
    numpy_type = array.dtype.newbyteorder("<")
    rows = np.ascontiguousarray(array, dtype=numpy_type).reshape(array.shape or (1,))
    kept = _without_repeats(rows)
    storage = _storage_of(kept)
    bits: Array
    if storage == "bfloat16":
        bits = (kept.view(np.uint32) >> 16).astype(np.uint16)
    else:
        bits = kept.astype(carrier(storage))  # a copy: the caller's batch need not stay in memory
    return Packed(bits, storage, numpy_type.str, array.ndim, len(rows))


def unpack(packed: Packed) -> Array:
    """A new array, equal to the one that was packed."""
    bits, length, rows = packed.bits, packed.length, len(packed.bits)
    zeros_follow = rows < length and not bits[-1].tobytes().strip(b"\0")
    out = (np.zeros if zeros_follow else np.empty)((length, *bits.shape[1:]), dtype=np.dtype(packed.numpy_type))
    if packed.storage == "bfloat16":
        whole = out[:rows].view(np.uint32)
        whole[...] = bits
        whole <<= 16
    else:
        out[:rows] = bits
    if rows < length and not zeros_follow:
        out[rows:] = out[rows - 1]
    return out if packed.axes else out.reshape(())


def _storage_of(rows: Array) -> str:
    kind, name = rows.dtype.kind, rows.dtype.name
    if kind == "f" and name in ("float16", "float32", "float64"):
        return _narrow_float(rows) if name == "float32" else name
    if kind == "b":
        return "uint8"
    if kind in "iu":
        low, high = (int(rows.min()), int(rows.max())) if rows.size else (0, 0)
        if low >= 0 and high < 2**8:
            return "uint8"
        if low >= -(2**31) and high < 2**31:
            return "int32"
        if high < 2**63:
            return "int64"
    raise LatentStoreError(
        f"outputs of type {name} cannot be stored: they must be floats or whole numbers up to 64 bits"
    )


def _narrow_float(rows: Array) -> str:
    bits = rows.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return "bfloat16"
    with np.errstate(all="ignore"):
        back = to_float32(rows.astype(np.float16), "float16")
    return "float16" if np.array_equal(back.view(np.uint32), bits) else "float32"


def _without_repeats(rows: Array) -> Array:
    """`rows` up to the first one that equals all rows behind it, bit for bit."""
    if len(rows) < 2:
        return rows
    flat = rows.reshape(len(rows), -1).view(f"u{rows.itemsize}")
    unlike_last = np.flatnonzero((flat[:-1] != flat[-1]).any(axis=1))
    return rows[: int(unlike_last[-1]) + 2 if len(unlike_last) else 1]


_RESERVED = {SPANS, ENTRIES, "__metadata__"}
_MOST_ARRAYS, _MOST_LETTERS = 256, 200  # so that a shard's header stays short


def check_outputs(arrays: Mapping[str, Packed]) -> None:
    """Raise `LatentStoreError` for outputs that a store cannot hold: none, too many, one of a reserved name, or one too
    large."""
    if not arrays or len(arrays) > _MOST_ARRAYS or _RESERVED & arrays.keys():
        raise LatentStoreError(
            f"outputs named {sorted(arrays)[:9]} cannot be stored: there are none, more than {_MOST_ARRAYS}, or one "
            "has a reserved name"
        )
    for name, packed in arrays.items():
        # each axis counts as 1 at least, see `_check_texts` in shards.py
        row_values = math.prod(max(1, side) for side in packed.bits.shape[1:])
        widest = row_values * max(8, packed.length * np.dtype(packed.numpy_type).itemsize)
        if packed.axes > MOST_AXES or widest > MOST_UNPACKED or len(name) > _MOST_LETTERS:
            raise LatentStoreError(
                f"an output {name[:_MOST_LETTERS]!r} of shape {[packed.length, *packed.bits.shape[1:]]} cannot be "
                f"stored: it has more than {MOST_AXES} axes or {MOST_UNPACKED:,} bytes, or too long a name"
            )


def checksum(spans: Array, bits: list[Array]) -> int:
    """CRC-32 of an item: the lengths of its arrays, then their bytes, by name. Their position does not count."""
    crc = zlib.crc32(np.ascontiguousarray(spans[:, 1:]).data)
    for array in bits:
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc


def joined(items: Sequence[Mapping[str, Packed]]) -> tuple[dict[str, tuple[str, Array]], dict[str, tuple[str, int]]]:
    """The tensors of a shard with these items, and its `arrays`, see `ShardInfo`.

    All items have the same array names, sorted, and layouts. Each name gets one tensor with the rows of all items;
    `SPANS` says which rows belong to which item.
    """
    names, n = list(items[0]), len(items)
    spans = np.empty((n, len(names), 3), dtype=carrier("int64"))
    tensors: dict[str, tuple[str, Array]] = {SPANS: ("int64", spans)}
    arrays: dict[str, tuple[str, int]] = {}
    for at, name in enumerate(names):
        column = [item[name] for item in items]
        rows = np.array([len(packed.bits) for packed in column])
        spans[:, at, 0] = np.cumsum(rows) - rows
        spans[:, at, 1] = rows
        spans[:, at, 2] = [packed.length for packed in column]
        arrays[name] = column[0].numpy_type, column[0].axes
    # wide types first, so that each tensor begins at a multiple of its own
    for name in sorted(names, key=lambda name: -items[0][name].bits.itemsize):
        tensors[name] = items[0][name].storage, np.concatenate([item[name].bits for item in items])
    return tensors, arrays


def split(
    tensors: Mapping[str, Any], row: int, storage: Mapping[str, str], arrays: Mapping[str, tuple[str, int]]
) -> dict[str, Packed]:
    """The arrays of one item of `joined`, without a copy. Raises `DamagedItemError` if one lies outside its tensor.

    Args:
        storage: storage type of each array.
        arrays: numpy type and number of axes of each array, as `joined` returned them.
    """
    outputs = {}
    for (name, (kind, axes)), (start, rows, length) in zip(arrays.items(), tensors[SPANS][row].tolist(), strict=True):
        tensor = tensors[name]
        inside = 0 <= start <= len(tensor) and 0 <= rows <= len(tensor) - start
        repeats = rows <= length if rows else length == 0
        nbytes = length * math.prod(tensor.shape[1:]) * np.dtype(kind).itemsize
        if not (inside and repeats and max(length, nbytes) <= MOST_UNPACKED and (axes > 0 or length == 1)):
            raise DamagedItemError(f"{name} lies outside its tensor")
        outputs[name] = Packed(tensor[start : start + rows], storage[name], kind, axes, length)
    return outputs
