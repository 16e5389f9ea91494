"""Shards in object storage: rows are asked for by ranges, and whole shards are kept on the node where they fit.

What will be read next is asked for at once.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.remote.node_cache import LIMIT_VARIABLE, NodeCache
from kohya_bucket.latents.remote.remote_path import RemotePath, StorePath
from kohya_bucket.latents.remote.storage import Range, read_merged, read_ranges
from kohya_bucket.latents.store.shards import MappedShards, ShardInfo, Tensors, TensorSpec

__all__ = ["RemoteRows", "RemoteShards", "Rows", "download", "shard_files"]

_log = logging.getLogger(__name__)
_PART = 8 << 20  # bytes of one request for a whole shard
_AT_ONCE = 4
_LOOK = 5.0  # seconds after which files that other processes let go of are let go of here, too


class Rows(NamedTuple):
    """Rows `start` to `stop` of one tensor of a shard."""

    info: ShardInfo
    tensor: str
    start: int
    stop: int

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.info.name, self.tensor, self.start, self.stop


class RemoteRows:
    """A tensor of a shard that is not on this node: its rows are read when they are asked for."""

    def __init__(self, shards: RemoteShards, info: ShardInfo, name: str) -> None:
        self._shards, self._info, self._name = shards, info, name
        self.shape = info.tensors[name].shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: int | slice) -> npt.NDArray[Any]:
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self))
            return self._shards.rows(Rows(self._info, self._name, start, max(start, stop)))
        return np.asarray(self._shards.rows(Rows(self._info, self._name, at, at + 1))[0])


class RemoteShards(MappedShards):
    """The shards of a store in object storage.

    Args:
        folder: where they are.
        cache: those that this node has.
        whole: bring what is read from to this node, as a whole, while rows of it are read by ranges.
    """

    def __init__(self, folder: RemotePath, cache: NodeCache, whole: bool) -> None:
        super().__init__(cache.folder)
        self._remote, self._cache, self.whole = folder, cache, whole
        self._asked: dict[tuple[str, str, int, int], npt.NDArray[Any]] = {}
        self._fetcher: _Fetcher | None = None
        self._looked = 0.0
        self._used: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | super().__getstate__() | {"_asked": {}, "_fetcher": None, "_looked": 0.0, "_used": set()}

    def tensors(self, info: ShardInfo) -> Tensors:
        """Arrays over the mapped file where this node has the shard, else `RemoteRows`."""
        if info.name in self._mapped or self._cache.holds(info.name, info.nbytes):
            self._used.add(info.name)
            self._look()
            with contextlib.suppress(LatentStoreError):  # it was let go of at this instant
                return super().tensors(info)
        if self.whole:
            self._fetch(info)
        return {name: RemoteRows(self, info, name) for name in info.tensors}

    def keep_open(self, many: int, nbytes: Iterable[int]) -> None:
        """Bring what is read from to this node, where `many` shards of these lengths are read from at a time."""
        self.whole = True
        if (needed := sum(sorted(nbytes)[-many:])) > self._cache.limit:
            _log.warning(
                "%s: order 'local' reads %d shards at a time, of up to %.3g GB, but this node keeps %.3g GB: shards "
                "are downloaded more than once. Raise %s, or lower open_shards",
                self._remote.parent, many, needed / 1e9, self._cache.limit / 1e9, LIMIT_VARIABLE,
            )  # fmt: skip

    def without_copies(self) -> RemoteShards:
        """The same, without what this node keeps."""
        return RemoteShards(self._remote, NodeCache(os.fspath(self._remote.parent), limit=0), False)

    def expect(self, wanted: Iterable[Rows]) -> None:
        """Ask at once for what will be read now, of shards that are not on this node."""
        rows = {one.key: one for one in wanted}
        if rows.keys() <= self._asked.keys():
            return
        there = {name: self.tensors(info) for name, info in {one.info.name: one.info for one in rows.values()}.items()}
        away = [one for one in rows.values() if isinstance(there[one.info.name].get(one.tensor), RemoteRows)]
        self._asked = dict(zip((one.key for one in away), self._ask(away), strict=True))

    def rows(self, wanted: Rows) -> npt.NDArray[Any]:
        """[stop - start, …] of a tensor, asked for if it was not."""
        found = self._asked.get(wanted.key)
        return self._ask([wanted])[0] if found is None else found

    def forget(self, info: ShardInfo) -> bool:
        """Give up this node's copy of a shard."""
        self._mapped.pop(info.name, None)
        self._cache.discard(info.name)
        return True

    def _ask(self, wanted: Sequence[Rows]) -> list[npt.NDArray[Any]]:
        ranges = []
        for info, tensor, start, stop in wanted:
            spec = info.tensors[tensor]
            each = _row_bytes(spec)
            ranges.append(Range(os.fspath(self._remote / info.name), spec.offset + start * each,
                                spec.offset + stop * each))  # fmt: skip
        try:
            found = read_merged(ranges)
        except FileNotFoundError as error:
            raise LatentStoreError(
                f"a shard is gone from {self._remote}: the store was packed or pruned meanwhile ({error})"
            ) from error
        out = []
        for (info, tensor, start, stop), data in zip(wanted, found, strict=True):
            spec = info.tensors[tensor]
            out.append(np.frombuffer(data, carrier(spec.dtype)).reshape(stop - start, *spec.shape[1:]))
        return out

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        used, self._used = self._used, set()  # other threads read, too
        for name in list(used):
            self._cache.used(name)
        for name in [name for name in list(self._mapped) if not (self._cache.folder / name).exists()]:
            self._mapped.pop(name, None)  # or else the disk has no room for what took its place

    def _fetch(self, info: ShardInfo) -> None:
        if self._fetcher is None or self._fetcher.process != os.getpid():
            self._fetcher = _Fetcher(self._bring)
        self._fetcher.begin(info)

    def _bring(self, info: ShardInfo) -> None:
        self._cache.keep(info.name, info.nbytes, partial(download, self._remote / info.name, info.nbytes))


class _Fetcher:
    """Brings shards on a thread of this process, one after the other; it ends with the process, in the middle too."""

    def __init__(self, bring: Callable[[ShardInfo], None]) -> None:
        self.process = os.getpid()
        self._bring = bring
        self._lock = threading.Lock()
        self._waiting: deque[ShardInfo] = deque()
        self._not_before: dict[str, float] = {}
        self._runs = False

    def begin(self, info: ShardInfo) -> None:
        with self._lock:
            if time.monotonic() < self._not_before.get(info.name, 0.0):
                return
            self._not_before[info.name] = math.inf
            self._waiting.append(info)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="kohya-bucket-shards", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._runs = False
                    return
                info = self._waiting.popleft()
            with contextlib.suppress(KohyaBucketError, OSError):  # whoever reads the rows will hear of it
                self._bring(info)
            self._not_before[info.name] = time.monotonic() + _LOOK


def shard_files(folder: StorePath, shards: Mapping[str, ShardInfo]) -> MappedShards:
    """The files of a store's shards: mapped, or in object storage."""
    if not isinstance(folder, RemotePath):
        return MappedShards(folder)
    cache = NodeCache(os.fspath(folder.parent))
    fits = sum(info.nbytes for info in shards.values()) <= cache.limit
    return RemoteShards(folder, cache, fits)


def download(source: RemotePath, nbytes: int, file: BinaryIO, alive: Callable[[], None] = lambda: None) -> None:
    """Write a file of object storage into one here, part by part."""
    for first in range(0, nbytes, _PART * _AT_ONCE):
        last = min(first + _PART * _AT_ONCE, nbytes)
        for data in read_ranges([Range(source.url, at, min(at + _PART, last)) for at in range(first, last, _PART)]):
            file.write(data)
        alive()


def _row_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape[1:]) * carrier(spec.dtype).itemsize
