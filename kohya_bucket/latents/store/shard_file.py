"""One shard: a safetensors file whose rows are items of one bucket.

Layout of a safetensors file: 8 bytes little-endian header length, a JSON header that gives each tensor's dtype,
shape and byte range, then the tensors without gaps. The header is padded with spaces so that data start at a
multiple of 64 bytes. Written by hand because the writer streams rows and checksums them on the way; every
safetensors reader opens the result.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import as_damage
from kohya_bucket.latents.dtypes import CODES, carrier
from kohya_bucket.latents.remote.remote_path import Place, open_to_read, write_new

__all__ = ["ENTRIES", "MOST_AXES", "TensorSpec", "read_header", "write_shard"]

ENTRIES = "entries"
_ALIGNMENT = 64
_MAX_HEADER = 1 << 20
MOST_AXES = 5
_NAMES = {code: name for name, code in CODES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Where a tensor lies: storage type by name, shape, and byte offset from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, dtype: Any, shape: Any, offset: Any) -> TensorSpec:
        """The same of values that a file states; `ValueError` or `KeyError` if there can be no such tensor."""
        if not all(type(n) is int and n >= 0 for n in (*shape, offset)) or len(shape) > MOST_AXES:
            raise ValueError(f"there can be no tensor of shape {shape!r} at byte {offset!r}")
        carrier(dtype)
        return cls(dtype, tuple(shape), offset)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * carrier(self.dtype).itemsize


def write_shard(
    path: Place, tensors: dict[str, tuple[str, npt.NDArray[Any]]], entries: bytes, metadata: dict[str, str]
) -> tuple[int, dict[str, TensorSpec]]:
    """Write `tensors` (name -> storage type and array of bits) and the rows' description as one new file.

    Returns the file's length and each tensor's place. Raises as `write_new` does.
    """
    arrays = {name: (dtype, np.ascontiguousarray(bits)) for name, (dtype, bits) in tensors.items()}
    arrays[ENTRIES] = ("uint8", np.frombuffer(entries, dtype=np.uint8))
    header: dict[str, Any] = {"__metadata__": metadata | {"entries_crc32": f"{zlib.crc32(entries):08x}"}}
    at = 0
    for name, (dtype, bits) in arrays.items():
        header[name] = {"dtype": CODES[dtype], "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    start = len(text) + 8
    specs = {
        name: TensorSpec(dtype, bits.shape, start + header[name]["data_offsets"][0])
        for name, (dtype, bits) in arrays.items()
    }
    parts = [struct.pack("<Q", len(text)), text, *(bits.reshape(-1).view(np.uint8) for _, bits in arrays.values())]
    return write_new(path, parts), specs


def read_header(path: Place) -> tuple[dict[str, TensorSpec], bytes, dict[str, str]]:
    """Places of the tensors, the description of the rows, and the metadata of a shard.

    Raises:
        LatentStoreError: truncated, or any byte of what is read here is not what was written.
    """
    with as_damage(f"shard {path} is damaged"), open_to_read(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        length = struct.unpack("<Q", file.read(8))[0]
        if length > min(size, _MAX_HEADER):
            raise ValueError(f"its header of {length} bytes does not fit into {size}")
        header = json.loads(file.read(length))
        metadata = header.pop("__metadata__")
        specs, end = {}, 0
        for name, spec in header.items():
            begin, stop = spec["data_offsets"]
            specs[name] = TensorSpec.of(_NAMES[spec["dtype"]], spec["shape"], 8 + length + begin)
            if begin != end or stop - begin != specs[name].nbytes:
                raise ValueError(f"tensor {name!r} does not fill its place")
            end = stop
        if 8 + length + end != size:
            raise ValueError(f"it is truncated: {size} bytes of {8 + length + end}")
        if specs[ENTRIES].dtype != "uint8" or len(specs[ENTRIES].shape) != 1:
            raise ValueError("its entries are not bytes")
        file.seek(specs[ENTRIES].offset)
        entries = file.read(specs[ENTRIES].nbytes)
        if f"{zlib.crc32(entries):08x}" != metadata["entries_crc32"]:
            raise ValueError("the checksum of its entries is wrong")
    return specs, entries, metadata
