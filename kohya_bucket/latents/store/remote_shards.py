"""Shards in object storage: rows are read by range requests, and whole shards are cached on the node where they fit.

What will be read next is requested together.

All processes of a node share one cache folder, with a limit in bytes and without a lock. A process that downloads a
shard writes it under a temporary name, and first makes that file as long as the shard, so that it counts; then it
removes the least recently used shards until everything fits, or gives up. Each process looks only after its own file
counts, so two that start at the same instant see each other. Leftovers of a killed process are removed after a minute
without a new byte.

fsspec's `filecache` (2026.9) has no limit in bytes and ignores other processes: four that started together downloaded a
shard four times, and in one of three rounds one of them read a file that another was writing. It served a copy that was
cut in half, and returned no row before the shard's last byte had come.

Only what is ours is removed: files named like shards and their temporary files, in folders named like stores, in a
folder of our name that holds our marker.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import digest
from kohya_bucket.errors import KohyaBucketError, LatentStoreError, UnreadableError
from kohya_bucket.files import final_name, user_cache, write_file
from kohya_bucket.inputs import MAX_CONFIG_BYTES, read_input
from kohya_bucket.latents.dtypes import carrier
from kohya_bucket.latents.store.layout import SHARD_NAME
from kohya_bucket.latents.store.shards import MappedShards, ShardInfo, Tensors
from kohya_bucket.latents.store.storage import Range, RemotePath, StorePath, read_merged, read_ranges
from kohya_bucket.texts import one_line

_log = logging.getLogger(__name__)
_PART = 8 << 20  # bytes of one request for a whole shard
_AT_ONCE = 4
_FOLDER_VARIABLE = "KOHYA_BUCKET_SHARDS"
_LIMIT_VARIABLE = "KOHYA_BUCKET_SHARDS_GB"
_DEFAULT_GB = 20.0
_STALE = 60.0  # seconds without a byte, after which a temporary file belongs to a dead process
_FOLDER = "kohya_bucket_shards"
_MARKER = "CACHEDIR.TAG"
_MARK = b"""Signature: 8a477f597d28d172789f06886806bc55
# Made by kohya_bucket, which removes shards in here to make room. See https://bford.info/cachedir/
"""
_STORE = re.compile(r"[0-9a-f]{16}")
_LOOK = 5.0  # seconds between looks at what other processes have removed


class RowRange(NamedTuple):
    """Rows `start` to `stop` of one tensor of a shard."""

    info: ShardInfo
    tensor: str
    start: int
    stop: int


class RemoteRows:
    """A tensor of a shard that is not on this node; indexing it requests rows."""

    def __init__(self, shards: RemoteShards, info: ShardInfo, name: str) -> None:
        self._shards, self._info, self._name = shards, info, name
        self.shape = info.tensors[name].shape

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, at: int | slice) -> npt.NDArray[Any]:
        if isinstance(at, slice):
            start, stop, _ = at.indices(len(self))
            return self._shards.rows(RowRange(self._info, self._name, start, max(start, stop)))
        return np.asarray(self._shards.rows(RowRange(self._info, self._name, at, at + 1))[0])


class RemoteShards(MappedShards):
    """The shards of a store in object storage, and in the node's cache. With `whole`, a shard that is read from is
    downloaded in the background, while its rows are read by requests."""

    def __init__(self, folder: RemotePath, cache: NodeCache, whole: bool) -> None:
        super().__init__(cache.folder)
        self._remote, self._cache, self.whole = folder, cache, whole
        self._fetched: dict[Range, memoryview] = {}
        self._fetcher: _Fetcher | None = None
        self._looked = 0.0
        self._used: set[str] = set()
        self._damaged: set[str] = set()  # shards whose copy here is damaged and cannot be removed yet (Windows)

    def __getstate__(self) -> dict[str, Any]:
        return (
            self.__dict__ | super().__getstate__() | {"_fetched": {}, "_fetcher": None, "_looked": 0.0, "_used": set()}
        )

    def tensors(self, info: ShardInfo) -> Tensors:
        """Arrays over the mapped file where this node has the shard, else `RemoteRows`."""
        self._look()
        if info.name not in self._damaged and (info.name in self._mapped or self._cache.holds(info.name, info.nbytes)):
            self._used.add(info.name)
            with suppress(LatentStoreError, UnreadableError):  # another process has just removed it
                return super().tensors(info)
        if self.whole:
            self._fetch(info)
        return {name: RemoteRows(self, info, name) for name in info.tensors}

    def keep_open(self, many: int, nbytes: Iterable[int]) -> None:
        """Cache every shard that is read from; `many` shards of these lengths are read at a time."""
        self.whole = True
        if (needed := sum(sorted(nbytes)[-many:])) > self._cache.limit:
            _log.warning(
                f"%s: order 'local' reads {many} shards at a time, of up to {needed / 1e9:.3g} GB, but this node keeps "
                f"{self._cache.limit / 1e9:.3g} GB: shards are downloaded more than once. Raise {_LIMIT_VARIABLE}, or "
                "lower open_shards",
                self._remote.parent,
            )

    def without_copies(self) -> RemoteShards:
        """The same shards without the node's cache."""
        return RemoteShards(self._remote, NodeCache(os.fspath(self._remote.parent), limit=0), False)

    def expect(self, wanted: Iterable[RowRange]) -> None:
        """Request together what will be read next, of shards that are not on this node."""
        rows = {self._range(row): row for row in wanted}
        if rows.keys() <= self._fetched.keys():
            return
        infos = {row.info.name: row.info for row in rows.values()}
        tensors = {name: self.tensors(info) for name, info in infos.items()}
        remote = [at for at, row in rows.items() if isinstance(tensors[row.info.name].get(row.tensor), RemoteRows)]
        self._fetched = dict(zip(remote, self._read(remote), strict=True))

    def rows(self, wanted: RowRange) -> npt.NDArray[Any]:
        """[stop - start, …] rows of a tensor, requested unless `expect` did."""
        at = self._range(wanted)
        data, spec = self._fetched.get(at), wanted.info.tensors[wanted.tensor]
        if data is None:
            (data,) = self._read([at])
        return np.frombuffer(data, carrier(spec.dtype)).reshape(wanted.stop - wanted.start, *spec.shape[1:])

    def forget(self, info: ShardInfo) -> bool:
        """Drop this node's copy of a shard, and what was fetched."""
        self._fetched = {}
        self._mapped.pop(info.name, None)
        if not self._cache.discard(info.name):
            self._damaged.add(info.name)
        return True

    def _range(self, wanted: RowRange) -> Range:
        spec = wanted.info.tensors[wanted.tensor]
        each = math.prod(spec.shape[1:]) * carrier(spec.dtype).itemsize
        url = os.fspath(self._remote / wanted.info.name)
        return Range(url, spec.offset + wanted.start * each, spec.offset + wanted.stop * each)

    def _read(self, ranges: Sequence[Range]) -> list[memoryview]:
        try:
            return read_merged(ranges)
        except FileNotFoundError as error:
            raise LatentStoreError(
                f"a shard is gone from {self._remote}: the store was packed or pruned meanwhile ({error})"
            ) from error

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        self._damaged = {name for name in self._damaged if not self._cache.discard(name)}
        used, self._used = self._used, set()  # other threads read, too
        for name in list(used):
            with suppress(OSError):
                os.utime(self._cache.folder / name)  # the least recently used go first
        for name in [name for name in list(self._mapped) if not (self._cache.folder / name).exists()]:
            self._mapped.pop(name, None)  # a mapped file that was removed still takes space

    def _fetch(self, info: ShardInfo) -> None:
        if self._fetcher is None or self._fetcher.process != os.getpid():
            self._fetcher = _Fetcher(self._bring)
        self._fetcher.begin(info)

    def _bring(self, info: ShardInfo) -> None:
        url, step = os.fspath(self._remote / info.name), _PART * _AT_ONCE

        def fill(file: BinaryIO) -> None:
            for first in range(0, info.nbytes, step):
                last = min(first + step, info.nbytes)
                for data in read_ranges([Range(url, at, min(at + _PART, last)) for at in range(first, last, _PART)]):
                    file.write(data)

        self._cache.keep(info.name, info.nbytes, fill)


class _Fetcher:
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
            with suppress(KohyaBucketError, OSError):  # reading its rows will say so
                self._bring(info)
            self._not_before[info.name] = time.monotonic() + _LOOK


class NodeCache:
    """A node's cached shards of the store at an address.

    `limit` is in bytes for all stores together; None: from the environment variable, else 20 GB; 0 keeps nothing.
    Raises `KohyaBucketError` if the variable is not a number.
    """

    def __init__(self, address: str, limit: int | None = None) -> None:
        named = os.environ.get(_FOLDER_VARIABLE)
        self.root = (Path(named).expanduser() if named else user_cache()) / _FOLDER  # env files leave ~ as it is
        text = os.environ.get(_LIMIT_VARIABLE, "").strip()
        try:
            gigabytes = float(text) if text else _DEFAULT_GB
            if not 0 <= gigabytes < 1e9:
                raise ValueError
        except ValueError:
            raise KohyaBucketError(
                f"{_LIMIT_VARIABLE} is {text!r}, but must be a number of gigabytes, 0 to keep no shards on this node"
            ) from None
        self.limit = int(gigabytes * 1e9) if limit is None else limit
        self._warned = False
        self.folder = self.root / digest(address)

    def holds(self, name: str, nbytes: int) -> bool:
        """Whether a shard is cached; its file is `folder / name`."""
        if not self.limit:
            return False
        try:
            return (self.folder / name).stat().st_size == nbytes
        except OSError:
            return False

    def discard(self, name: str) -> bool:
        """Remove a shard, for example a damaged one; returns whether it is gone."""
        with suppress(OSError):
            (self.folder / name).unlink(missing_ok=True)
            return True
        return False

    def keep(self, name: str, nbytes: int, fill: Callable[[BinaryIO], None]) -> bool:
        """Cache a shard, unless another process is doing so or there is no room; returns whether it is cached.

        Args:
            fill: writes it into a file. If it raises, nothing is kept.
        """
        if self.holds(name, nbytes):
            return True
        if nbytes > self.limit or not SHARD_NAME.fullmatch(name):
            return False

        def write(file: BinaryIO) -> None:
            # From here on this file counts for the other processes.
            file.truncate(nbytes)
            coming = self._files(coming=True)
            # Of several that download this shard, all see each other's files, and the first by name goes on.
            first = all(path >= Path(file.name) for path in coming if _kept_as(path) == self.folder / name)
            if self.holds(name, nbytes) or not first or not self._make_room(coming):
                raise _GivenUpError
            fill(file)

        try:
            _make_ours(self.root)
            self.folder.mkdir(exist_ok=True)
            if any(_kept_as(path) == self.folder / name for path in self._files(coming=True)):
                return False
            write_file(self.folder / name, write, sync=False)
        except _GivenUpError:
            return self.holds(name, nbytes)
        except (OSError, LatentStoreError) as error:  # a full disk or a read-only folder: it works without a cache
            if self.holds(name, nbytes):  # Windows: another process was faster, and has it open
                return True
            if not self._warned:
                why: object = f"{self.root}: {error.strerror or error}" if isinstance(error, OSError) else error
                _log.warning("a shard is not cached on this node, and is read by requests: %s", one_line(why))
            self._warned = True
            return False
        return True

    def _make_room(self, arriving: dict[Path, tuple[float, int]]) -> bool:
        """Remove shards until the cached and the arriving ones fit; False if they do not. Each counts once."""
        coming = {_kept_as(path): nbytes for path, (_, nbytes) in arriving.items()}
        shards = self._files(coming=False)  # listed later, so that one which has arrived meanwhile is not missed
        total = sum((coming | {path: nbytes for path, (_, nbytes) in shards.items()}).values())
        for path, (_, nbytes) in sorted(shards.items(), key=lambda item: item[1]):
            if total <= self.limit:
                break
            if path in coming:
                continue
            with suppress(OSError):  # Windows: a process has it mapped
                path.unlink(missing_ok=True)
                total -= nbytes
        return total <= self.limit

    def _files(self, coming: bool) -> dict[Path, tuple[float, int]]:
        """(time, length) of all stores' cached shards, or of arriving ones; leftovers of dead processes are removed."""
        files = {}
        for folder in [folder for folder in self.root.iterdir() if _STORE.fullmatch(folder.name)]:
            listed: list[Path] = []
            with suppress(OSError):  # gone meanwhile, or another user's
                listed = list(folder.iterdir())
            for path in listed:
                if SHARD_NAME.fullmatch(final_name(path.name) if coming else path.name):
                    with suppress(OSError):
                        stat = path.stat()
                        files[path] = stat.st_mtime, stat.st_size
                        if coming and time.time() - stat.st_mtime > _STALE:
                            path.unlink()
                            del files[path]
        return files


class _GivenUpError(Exception):
    pass


def _kept_as(temporary: Path) -> Path:
    return temporary.parent / final_name(temporary.name)


def _make_ours(root: Path) -> None:
    """Make the folder with our marker, or mark an empty one. Raises `LatentStoreError` if it is not ours."""
    marker = root / _MARKER
    root.mkdir(parents=True, exist_ok=True)
    if all(final_name(path.name) == _MARKER for path in root.iterdir()):
        write_file(marker, [_MARK], sync=False)
    if not marker.is_file() or read_input(marker, MAX_CONFIG_BYTES) != _MARK:
        raise LatentStoreError(f"{root} was not made by kohya_bucket: rename it, or set {_FOLDER_VARIABLE}")


def shard_files(folder: StorePath, shards: Mapping[str, ShardInfo]) -> MappedShards:
    """A store's shards: mapped files, or in object storage."""
    if not isinstance(folder, RemotePath):
        return MappedShards(folder)
    cache = NodeCache(os.fspath(folder.parent))
    fits = sum(info.nbytes for info in shards.values()) <= cache.limit
    return RemoteShards(folder, cache, fits)
