"""An npz opened once, for as little of it as is asked for: names, shapes, single arrays, checksums.

Anybody may have written it, so nothing is unpacked before what it states of itself has been compared with its length.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.files import write_file

__all__ = ["BROKEN", "BrokenNpzError", "OpenNpz", "member_crc", "read_arrays", "write_arrays"]


class BrokenNpzError(LatentStoreError):
    """A file that is no npz, or one that is damaged, or states what cannot be."""


# what a missing, damaged or foreign file may raise
BROKEN = (OSError, BrokenNpzError)

_MOST = 1 << 32  # bytes, unpacked
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class OpenNpz:
    """A file as `np.savez` writes it, to be used in a `with`. Every use may raise one of `BROKEN`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with as_damage("no npz", error=BrokenNpzError):
            self._archive = zipfile.ZipFile(path)
        self._members = {member.filename: member for member in self._archive.infolist()}
        self.names = [name.removesuffix(".npy") for name in self._members if name.endswith(".npy")]

    def __enter__(self) -> OpenNpz:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array, from its header."""
        with self._member(f"{name}.npy") as (file, _):
            return _header(file)[0]

    def array(self, name: str) -> npt.NDArray[Any]:
        """An array, whose checksum is right."""
        with self._member(f"{name}.npy") as (file, nbytes):
            shape, in_columns, dtype = _header(file)
            if dtype.hasobject or math.prod(shape) * dtype.itemsize != nbytes - file.tell():
                raise ValueError(f"{name} has {nbytes} bytes, which is not an array of shape {shape} and type {dtype}")
            data = bytearray(file.read())
            array: npt.NDArray[Any] = np.ndarray(shape, dtype, data, order="F" if in_columns else "C")
            return array

    def numbers(self, name: str, count: int) -> list[float]:
        """The values of an array of `count` finite numbers."""
        if self.shape(name) != (count,):
            raise BrokenNpzError(f"{name} is not a row of {count} numbers")
        array = self.array(name)
        if array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise BrokenNpzError(f"{name} holds {array.tolist()}")
        return list(array.tolist())

    def floats(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """An array of floating-point numbers of this shape."""
        if self.shape(name) != shape:
            raise BrokenNpzError(f"{name} has shape {list(self.shape(name))}, not {list(shape)}")
        array = self.array(name)
        if array.dtype.kind != "f":
            raise BrokenNpzError(f"{name} holds {array.dtype}, not floating-point numbers")
        return array

    def crc(self, name: str) -> int:
        """Checksum that the directory states, see `member_crc`."""
        return self._members[f"{name}.npy"].CRC

    def is_cut_off(self, name: str) -> bool:
        member = self._members[f"{name}.npy"]
        return member.compress_type == zipfile.ZIP_STORED and member.file_size > member.compress_size

    def damaged(self) -> str | None:
        """Name of the first array whose bytes have not the checksum stated; all are read."""
        for name in self._members:
            try:
                with self._member(name) as (file, _):
                    while file.read(1 << 20):
                        pass
            except BROKEN:
                return name.removesuffix(".npy")
        return None

    @contextmanager
    def _member(self, name: str) -> Iterator[tuple[Any, int]]:
        """A part of the archive, open, and its length."""
        with as_damage(name, error=BrokenNpzError):
            member = self._members[name]
            # bzip2 and lzma unpack without a limit, and numpy writes neither
            if member.flag_bits & 1 or member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                raise ValueError("it is encrypted, or packed in a way that no npz is")
            if member.file_size > _MOST:
                raise ValueError(f"it claims {member.file_size} bytes")
            with self._archive.open(member) as file:
                yield file, member.file_size


def _header(file: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    shape, in_columns, dtype = _READERS[np.lib.format.read_magic(file)](file)
    if not all(type(side) is int and side >= 0 for side in shape) or not dtype.itemsize:
        raise ValueError(f"no array has shape {shape} and type {dtype}")
    return tuple(shape), in_columns, dtype


def read_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a file that can be read: none of one that is missing or no npz."""
    arrays = {}
    with suppress(*BROKEN), OpenNpz(path) as file:
        for name in file.names:
            with suppress(*BROKEN):
                arrays[name] = file.array(name)
    return arrays


def write_arrays(path: Path, arrays: dict[str, npt.NDArray[Any]], *, sync: bool = True) -> None:
    """`np.savez`, whole or not at all. Raises `LatentStoreError` as `write_file` does."""
    write_file(path, lambda out: np.savez(out, **arrays), sync=sync)  # type: ignore[arg-type]


def member_crc(array: npt.NDArray[Any]) -> int:
    """CRC-32 of an array as it lies in an npz."""
    array = np.asarray(array)
    out = io.BytesIO()
    if not array.flags.c_contiguous:
        np.lib.format.write_array(out, array, allow_pickle=False)
        return zlib.crc32(out.getbuffer())
    np.lib.format.write_array_header_1_0(out, np.lib.format.header_data_from_array_1_0(array))
    return zlib.crc32(array.reshape(-1).view(np.uint8).data, zlib.crc32(out.getbuffer()))
