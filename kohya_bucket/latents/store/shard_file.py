"""One shard: a safetensors file whose rows are items of one bucket.

Layout of a safetensors file: 8 bytes little-endian header length, a JSON header that gives each tensor's dtype,
shape and byte range, then the tensors without gaps. The header is padded with spaces so that data start at a
multiple of 64 bytes. Written by hand because the writer streams rows and checksums them on the way; every
safetensors reader opens the result.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.files import write_file
from kohya_bucket.latents.dtypes import CODES, carrier

__all__ = ["ENTRIES", "TensorSpec", "read_header", "write_shard"]

ENTRIES = "entries"
_ALIGNMENT = 64
_MAX_HEADER = 100_000_000
_NAMES = {code: name for name, code in CODES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """Where a tensor lies: storage type by name, shape, and byte offset from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * carrier(self.dtype).itemsize


def write_shard(
    path: Path, tensors: dict[str, tuple[str, npt.NDArray[Any]]], entries: bytes, metadata: dict[str, str]
) -> tuple[int, dict[str, TensorSpec]]:
    """Write `tensors` (name -> storage type and array of bits) and the rows' description as one new file.

    Returns the file's length and each tensor's place. Raises `LatentStoreError` as `write_file` does.
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
    return write_file(path, parts), specs


def read_header(path: Path) -> tuple[dict[str, TensorSpec], bytes, dict[str, str]]:
    """Places of the tensors, the description of the rows, and the metadata of a shard.

    Raises:
        LatentStoreError: truncated, or any byte of what is read here is not what was written.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = struct.unpack("<Q", file.read(8))[0]
            if length > min(size, _MAX_HEADER):
                raise ValueError(f"its header of {length} bytes does not fit into {size}")
            header = json.loads(file.read(length))
            metadata = header.pop("__metadata__")
            specs, end = {}, 0
            for name, spec in header.items():
                begin, stop = spec["data_offsets"]
                specs[name] = TensorSpec(_NAMES[spec["dtype"]], tuple(spec["shape"]), 8 + length + begin)
                if begin != end or stop - begin != specs[name].nbytes:
                    raise ValueError(f"tensor {name!r} does not fill its place")
                end = stop
            if 8 + length + end != size:
                raise ValueError(f"it is truncated: {size} bytes of {8 + length + end}")
            file.seek(specs[ENTRIES].offset)
            entries = file.read(specs[ENTRIES].nbytes)
        if f"{zlib.crc32(entries):08x}" != metadata["entries_crc32"]:
            raise ValueError("the checksum of its entries is wrong")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise LatentStoreError(f"shard {path} is damaged: {error}") from error
    return specs, entries, metadata
