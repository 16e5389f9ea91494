"""An npz opened once, for as little of it as is asked for: names, shapes, single arrays, checksums."""

from __future__ import annotations

import io
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.files import write_file

__all__ = ["BROKEN", "OpenNpz", "member_crc", "read_arrays", "write_arrays"]

# what a missing, damaged or foreign file may raise
BROKEN = (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


class OpenNpz:
    """A file as `np.savez` writes it, to be used in a `with`. Every use may raise one of `BROKEN`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive = zipfile.ZipFile(path)
        self.names = [name.removesuffix(".npy") for name in self._archive.namelist() if name.endswith(".npy")]

    def __enter__(self) -> OpenNpz:
        return self

    def __exit__(self, *_: object) -> None:
        self._archive.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of an array, from its header."""
        with self._archive.open(f"{name}.npy") as file:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return tuple(read(file)[0])

    def array(self, name: str) -> npt.NDArray[Any]:
        with self._archive.open(f"{name}.npy") as file:
            return np.asarray(np.lib.format.read_array(file, allow_pickle=False))

    def crc(self, name: str) -> int:
        """Checksum that the directory states, see `member_crc`."""
        return self._archive.getinfo(f"{name}.npy").CRC

    def is_cut_off(self, name: str) -> bool:
        info = self._archive.getinfo(f"{name}.npy")
        return info.compress_type == zipfile.ZIP_STORED and info.file_size > info.compress_size

    def damaged(self) -> str | None:
        """Name of the first array whose bytes have not the checksum stated; all are read."""
        name = self._archive.testzip()
        return None if name is None else name.removesuffix(".npy")


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
    out = io.BytesIO()
    np.savez(out, **arrays)  # type: ignore[arg-type]
    write_file(path, [out.getbuffer()], sync=sync)


def member_crc(array: npt.NDArray[Any]) -> int:
    """CRC-32 of an array as it lies in an npz."""
    out = io.BytesIO()
    np.lib.format.write_array(out, np.asanyarray(array), allow_pickle=False)
    return zlib.crc32(out.getbuffer())
