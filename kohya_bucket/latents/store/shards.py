"""Shards: safetensors files whose rows are items of one bucket, their description, and their tensors in memory.

They are written without the safetensors package, in parts, with data that start at a multiple of 64 bytes. A reader
trusts nothing: it checks that the stated tensors belong together and lie in the file. Shards on disk are mapped into
memory, so that tensors are arrays without a copy.
"""

from __future__ import annotations

import functools
import json
import math
import mmap
import os
import struct
import zlib
from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError, as_damage, reading
from kohya_bucket.inputs import open_input
from kohya_bucket.latents.dtypes import CODES, LATENT_DTYPES, STORED_AS, carrier
from kohya_bucket.latents.space import LatentSpace
from kohya_bucket.latents.store.layout import remedy
from kohya_bucket.latents.store.storage import StorePath, open_to_read, write_new

ENTRIES = "entries"
_ALIGNMENT = 64
_MAX_HEADER = 1 << 20
MOST_AXES = 5
_NAMES = {code: name for name, code in CODES.items()}


@dataclass(frozen=True)
class TensorSpec:
    """A tensor's place: storage type by name, shape, and byte offset from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def from_json(cls, dtype: Any, shape: Any, offset: Any) -> TensorSpec:
        """From what a file states. Raises `ValueError` or `KeyError` where there can be no such tensor."""
        if not all(type(n) is int and n >= 0 for n in (*shape, offset)) or len(shape) > MOST_AXES:
            raise ValueError(f"there can be no tensor of shape {shape!r} at byte {offset!r}")
        carrier(dtype)
        return cls(dtype, tuple(shape), offset)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * carrier(self.dtype).itemsize


def write_shard(
    path: StorePath, tensors: dict[str, tuple[str, npt.NDArray[Any]]], entries: bytes, metadata: dict[str, str]
) -> None:
    """Write `tensors` (name -> storage type and array of bits) and the rows as a new file. Raises as `write_new`."""
    arrays = {name: (dtype, np.ascontiguousarray(bits)) for name, (dtype, bits) in tensors.items()}
    arrays[ENTRIES] = ("uint8", np.frombuffer(entries, dtype=np.uint8))
    header: dict[str, Any] = {"__metadata__": metadata | {"entries_crc32": f"{zlib.crc32(entries):08x}"}}
    at = 0
    for name, (dtype, bits) in arrays.items():
        header[name] = {"dtype": CODES[dtype], "shape": list(bits.shape), "data_offsets": [at, at + bits.nbytes]}
        at += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    write_new(
        path, [struct.pack("<Q", len(text)), text, *(bits.reshape(-1).view(np.uint8) for _, bits in arrays.values())]
    )


def read_header(path: StorePath) -> tuple[dict[str, TensorSpec], bytes, dict[str, str]]:
    """A shard's tensors, rows and metadata. Raises `LatentStoreError` if it is truncated, or if what is read here is
    damaged."""
    with as_damage(f"shard {path} is damaged"), reading(path), open_to_read(path) as file:
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
            specs[name] = TensorSpec.from_json(_NAMES[spec["dtype"]], spec["shape"], 8 + length + begin)
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


KINDS = ("latents", "posterior", "text")
SPANS = "spans"  # [N, arrays, 3] int64: the first row in the array's tensor, the number of rows, the same once unpacked
MOST_UNPACKED = 1 << 30  # bytes of one unpacked array of a caption


@dataclass(frozen=True)
class ShardInfo:
    """A shard's file: name, length in bytes, the places of its tensors, and what they mean.

    For text-encoder outputs `arrays` has the original numpy type and number of axes of each array, and `tensors` has
    one tensor of the same name with the rows of all items, and `SPANS`.
    """

    name: str
    nbytes: int
    tensors: dict[str, TensorSpec]
    space: LatentSpace
    arrays: dict[str, tuple[str, int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of items, including those that newer ones have replaced."""
        return (self.tensors[SPANS] if self.arrays else self.latents).shape[0]

    @property
    def latents(self) -> TensorSpec:
        """The tensor of latents, or of mean and standard deviation. Raises `LatentStoreError` for text outputs."""
        if self.arrays:
            raise LatentStoreError(f"shard {self.name} holds text-encoder outputs, not latents")
        return self.tensors[self.kind]

    @property
    def kind(self) -> str:
        """What its rows are, one of `KINDS`; "posterior": mean and standard deviation."""
        return "text" if self.arrays else "posterior" if "posterior" in self.tensors else "latents"

    def to_json(self) -> dict[str, Any]:
        tensors = {name: [spec.dtype, list(spec.shape), spec.offset] for name, spec in self.tensors.items()}
        data = {"name": self.name, "bytes": self.nbytes, "tensors": tensors, "space": asdict(self.space)}
        return data | ({"arrays": {name: list(array) for name, array in self.arrays.items()}} if self.arrays else {})

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ShardInfo:
        """The inverse of `to_json`, for a file that anybody may have changed. Raises `ValueError`, `TypeError` or
        `KeyError` if there can be no such shard."""
        specs = {name: TensorSpec.from_json(*spec) for name, spec in data["tensors"].items()}
        space = LatentSpace.from_json(data["space"])
        return cls(data["name"], data["bytes"], specs, space, stated_arrays(data)).checked()

    def checked(self) -> ShardInfo:
        """Itself, if its tensors belong together and lie in the file; else `ValueError` or `TypeError`."""
        (_check_texts if self.arrays else _check_latents)(self)
        if type(self.nbytes) is not int or any(s.offset + s.nbytes > self.nbytes for s in self.tensors.values()):
            raise ValueError(f"shard {self.name!r} of {self.nbytes!r} bytes cannot hold its tensors")
        return self


def stated_arrays(data: dict[str, Any]) -> dict[str, tuple[str, int]]:
    """`ShardInfo.arrays` as a shard or a manifest states it; empty for latents."""
    return {name: (numpy_type, axes) for name, (numpy_type, axes) in data.get("arrays", {}).items()}


def _check_latents(info: ShardInfo) -> None:
    unknown, is_posterior = dict(info.tensors), info.kind == "posterior"
    mask = unknown.pop("alpha_mask", None)
    main = unknown.pop(info.kind, None)
    flipped = unknown.pop(f"{info.kind}_flipped", main)
    if unknown or main is None or main.dtype not in LATENT_DTYPES or len(main.shape) != 4 + is_posterior:
        raise ValueError(f"shard {info.name!r} cannot hold the tensors {sorted(info.tensors)}")
    if info.space.values == "text":
        raise ValueError(f"shard {info.name!r} holds latents, but its note says text outputs")
    if is_posterior and main.shape[1] != 2:
        raise ValueError(f"shard {info.name!r} holds no mean and deviation, but a shape of {list(main.shape)}")
    if flipped is None or (flipped.dtype, flipped.shape) != (main.dtype, main.shape) or not main.nbytes:
        raise ValueError(f"shard {info.name!r} holds mirrored latents of another shape")
    if mask is not None and (mask.dtype != "uint8" or len(mask.shape) != 3):
        raise ValueError(f"shard {info.name!r} holds masks of type {mask.dtype} and shape {list(mask.shape)}")


def _check_texts(info: ShardInfo) -> None:
    specs = dict(info.tensors)
    spans = specs.pop(SPANS, None)
    # Sorted: the columns of `SPANS` are in this order.
    if specs.keys() != info.arrays.keys() or list(info.arrays) != sorted(info.arrays) or info.space.values != "text":
        raise ValueError(f"shard {info.name!r} cannot hold the tensors {sorted(info.tensors)} of {list(info.arrays)}")
    if spans is None or spans.dtype != "int64" or spans.shape[1:] != (len(specs), 3) or not spans.nbytes:
        raise ValueError(f"shard {info.name!r} does not say which rows belong to which text")
    for name, (numpy_type, axes) in info.arrays.items():
        spec = specs[name]
        if not isinstance(numpy_type, str) or spec.dtype not in STORED_AS.get(numpy_type, ()):
            raise ValueError(f"shard {info.name!r} cannot hold {name!r} of type {numpy_type!r} as {spec.dtype}")
        # Each axis counts as 1 at least: an axis of 0 would allow any length.
        widest = 8 * math.prod(max(1, side) for side in spec.shape[1:])
        if type(axes) is not int or not 0 <= axes <= MOST_AXES or len(spec.shape) != max(1, axes):
            raise ValueError(f"shard {info.name!r} cannot hold {name!r} of {axes!r} axes as {list(spec.shape)}")
        if widest > MOST_UNPACKED:
            raise ValueError(f"shard {info.name!r} cannot hold {name!r} of shape {list(spec.shape)}")


_MOST = 512
Tensors = dict[str, Any]  # arrays, or objects that are indexed by rows as arrays are


class MappedShards:
    """The shards of a folder, each mapped when it is first read. A process that gets a copy maps its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: OrderedDict[str, Tensors] = OrderedDict()
        self._checked: dict[str, dict[str, npt.NDArray[np.bool_]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_mapped": OrderedDict(), "_checked": {}}

    def tensors(self, info: ShardInfo) -> Tensors:
        """A shard's tensors as arrays over the mapped file; writing into one changes this process' copy only. Raises
        `LatentStoreError` if the file is gone or of another length, `UnreadableError` if it cannot be read now."""
        tensors = self._mapped.get(info.name)
        if tensors is None:
            try:
                tensors = _map(self._folder / info.name, info)
            except FileNotFoundError as error:
                raise LatentStoreError(
                    f"shard {info.name} is gone from {self._folder}: the store was packed or pruned meanwhile"
                ) from error
            self._mapped[info.name] = tensors
            self._checked.pop(info.name, None)  # it may be another file by now
            if len(self._mapped) > most_mapped():
                self._mapped.popitem(last=False)
        return tensors

    def checked(self, info: ShardInfo, tensor: str) -> npt.NDArray[np.bool_]:
        """[N] which rows of a tensor were verified since the file was mapped; whoever verifies one sets its flag."""
        flags = self._checked.setdefault(info.name, {})
        if tensor not in flags:
            flags[tensor] = np.zeros(info.tensors[tensor].shape[0], dtype=bool)
        return flags[tensor]

    def forget(self, info: ShardInfo) -> bool:
        """Give up a damaged copy of a shard; returns whether its rows can be read from elsewhere."""
        return False

    def release(self) -> None:
        """Unmap all files, so that they can be removed on Windows too."""
        self._mapped.clear()


@functools.cache
def most_mapped() -> int:
    """How many shards are mapped at once: each keeps a file open, and a process may have few (256 on macOS)."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return _MOST
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if limit == resource.RLIM_INFINITY else min(_MOST, max(1, limit // 3))


def _map(path: Path, info: ShardInfo) -> Tensors:
    with reading(path), open_input(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != info.nbytes:
            raise LatentStoreError(
                f"shard {path} is {'truncated' if size < info.nbytes else 'too long'}: {size} bytes of {info.nbytes}: "
                f"{remedy(path.parent.parent)}"
            )
        bits = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    with as_damage(f"shard {path} cannot be read"):
        return {
            name: np.frombuffer(bits, carrier(spec.dtype), math.prod(spec.shape), spec.offset).reshape(spec.shape)
            for name, spec in info.tensors.items()
        }
