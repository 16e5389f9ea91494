"""Shards mapped into memory: their tensors as arrays, without a copy."""

from __future__ import annotations

import functools
import math
import mmap
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError, as_damage
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.store.shard_info import ShardInfo

__all__ = ["MappedShards", "OneShard", "Tensors"]

_MOST = 512
Tensors = dict[str, Any]  # arrays, or what gives their rows as an array does


class MappedShards:
    """The shards of a folder, each mapped when it is first read. A process that gets a copy maps its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mapped: OrderedDict[str, Tensors] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_mapped": OrderedDict()}

    def tensors(self, info: ShardInfo) -> Tensors:
        """A shard's tensors as arrays over the mapped file: writing into one changes this process' copy only.

        Raises:
            LatentStoreError: the file is gone, or shorter or longer than when it was written.
        """
        found = self._mapped.get(info.name)
        if found is None:
            try:
                found = mapped(self._folder / info.name, info)
            except FileNotFoundError as error:
                raise LatentStoreError(
                    f"shard {info.name} is gone from {self._folder}: the store was packed or pruned meanwhile"
                ) from error
            except OSError as error:
                raise LatentStoreError(f"shard {info.name} cannot be read: {error.strerror or error}") from error
            self._mapped[info.name] = found
            if len(self._mapped) > most_mapped():
                self._mapped.popitem(last=False)
        return found

    def again(self, info: ShardInfo, tensor: str, row: int) -> npt.NDArray[Any] | None:
        """A row whose checksum was wrong, from where it may be right; None where there is no such place."""
        return None

    def release(self) -> None:
        """Let go of all files, so that they can be removed on Windows too."""
        self._mapped.clear()


class OneShard(MappedShards):
    """A copy of one shard, under whatever name."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.parent)
        self._path = path

    def tensors(self, info: ShardInfo) -> Tensors:
        if info.name not in self._mapped:
            self._mapped[info.name] = mapped(self._path, info)
        return self._mapped[info.name]


@functools.cache
def most_mapped() -> int:
    """How many shards are mapped at a time: each holds a file open, and a process may have few (256 on macOS)."""
    try:
        import resource
    except ImportError:  # Windows, which has no such limit
        return _MOST
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if limit == resource.RLIM_INFINITY else min(_MOST, max(1, limit // 3))


def mapped(path: Path, info: ShardInfo) -> Tensors:
    """A shard's tensors as arrays over its mapped file."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != info.nbytes:
            raise LatentStoreError(
                f"shard {path} is {'truncated' if size < info.nbytes else 'too long'}: {size} bytes of {info.nbytes}; "
                "run `kohya-bucket cache repair`"
            )
        bits = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    with as_damage(f"shard {path} cannot be read"):
        return {
            name: np.frombuffer(bits, carrier(spec.dtype), math.prod(spec.shape), spec.offset).reshape(spec.shape)
            for name, spec in info.tensors.items()
        }
