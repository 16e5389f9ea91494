"""Object storage with retries: list, read ranges, put if absent, delete; and addresses with the interface of `Path`.

A failed request is repeated after a random wait that doubles each time, so that the processes of a cluster do not
return all at once. That a file is absent, or exists already, is an answer and not a failure.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, NamedTuple, TypeAlias, TypeVar

from kohya_bucket.errors import LatentStoreError, StorageError, reading
from kohya_bucket.files import write_file
from kohya_bucket.images import remote
from kohya_bucket.images.remote import RawFile, as_os_error, is_url
from kohya_bucket.inputs import open_input

_TRIES = 7
_MOST_PUT = 5 << 30  # bytes in one request; parts of an upload would stay, unseen and paid for, if the writer dies
_FIRST_WAIT = 0.2  # seconds; up to 6.4, so 6 s to 13 s in all
_chance = random.SystemRandom()  # leaves a trainer's generator alone, and differs between forked processes
_ANSWERS = (FileNotFoundError, FileExistsError)
_Answer = TypeVar("_Answer")


def storage_of(url: str) -> tuple[Any, str]:
    """`images.remote.storage_of`, but a client for S3 tries once: its retries would multiply with ours."""
    system, path = remote.storage_of(url)
    return _asking_once(system, os.getpid()), path


@functools.lru_cache(maxsize=64)
def _asking_once(system: Any, _process: int) -> Any:
    if not _is_s3(system):
        return system
    settings = system.config_kwargs | {"retries": {"total_max_attempts": 1}}
    once = type(system)(**system.storage_options | {"config_kwargs": settings, "skip_instance_cache": True})
    once.retries = 1
    return once


def _is_s3(system: Any) -> bool:
    return hasattr(system, "config_kwargs")  # of s3fs


class Range(NamedTuple):
    """Bytes `start` to `stop` of the file at `url`."""

    url: str
    start: int
    stop: int


def listing(url: str) -> dict[str, int]:
    """Length in bytes of the files directly below an address, by name; empty if there is no such folder."""
    system, path = storage_of(url)

    def ask() -> list[dict[str, Any]]:
        system.invalidate_cache(path)  # other processes write there
        try:
            return list(system.ls(path, detail=True))
        except FileNotFoundError:
            return []

    files = [info for info in _until_answered(f"{url}: cannot be listed", ask) if info["type"] == "file"]
    return {info["name"].rstrip("/").rpartition("/")[2]: int(info["size"] or 0) for info in files}


def length(url: str) -> int:
    """Length of a file in bytes. Raises `FileNotFoundError` if there is none."""
    system, path = storage_of(url)

    def ask() -> dict[str, Any]:
        system.invalidate_cache(path)
        return dict(system.info(path))

    info = _until_answered(f"{url}: cannot be read", ask)
    if info["type"] != "file":
        raise FileNotFoundError(f"{url} is not a file")
    return int(info["size"] or 0)


def read_ranges(ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range, requested together; only what failed is requested again.

    Raises `FileNotFoundError` if a file does not exist, `StorageError` if a range cannot be read or comes short.
    """
    if not ranges:
        return []
    contents: list[bytes] = [b""] * len(ranges)
    missing = [k for k, part in enumerate(ranges) if part.stop > part.start]
    paths = [storage_of(part.url)[1] for part in ranges]
    system, _ = storage_of(ranges[0].url)

    def ask() -> None:
        problem: BaseException | None = None
        starts, stops = [ranges[k].start for k in missing], [ranges[k].stop for k in missing]
        answers = system.cat_ranges([paths[k] for k in missing], starts, stops, on_error="return")
        for k, answer in zip(list(missing), answers, strict=True):
            nbytes = ranges[k].stop - ranges[k].start
            if isinstance(answer, BaseException):
                problem = answer
            elif answer is None or len(answer) != nbytes:
                problem = OSError(f"{ranges[k].url} gave {len(answer or b'')} bytes of {nbytes}")
            else:
                contents[k] = answer
                missing.remove(k)
        if problem is not None:
            raise problem

    if missing:
        _until_answered(f"{ranges[missing[0]].url}: cannot be read", ask)
    return contents


def create(url: str, data: bytes) -> None:
    """Put a whole file where there is none, or the same; see `check_exclusive`. Raises `FileExistsError` if there is a
    different one, `StorageError` if it cannot be written."""
    system, path = storage_of(url)
    whole = {"chunksize": _MOST_PUT} if _is_s3(system) else {}

    def ask() -> None:
        try:
            system.pipe_file(path, data, mode="create", **whole)
        except FileExistsError:
            # It may be ours, by an earlier try whose answer was lost; a cached listing would not have it.
            system.invalidate_cache(path)
            if bytes(system.cat_file(path)) != data:
                raise

    try:
        _until_answered(f"{url}: cannot be written", ask)
    except FileNotFoundError as error:
        raise StorageError(f"{url}: cannot be written, because there is no such bucket or folder ({error})") from error


def delete(url: str) -> None:
    """Raises `FileNotFoundError` if there is no such file, where the storage tells."""
    system, path = storage_of(url)
    _until_answered(f"{url}: cannot be deleted", lambda: system.rm_file(path))


@functools.lru_cache(maxsize=64)
def check_exclusive(url: str) -> None:
    """Raise `StorageError` unless the storage can refuse to replace a file (on S3: If-None-Match), so that two writers
    cannot destroy each other's work. It is tried once."""
    why = (
        f"{url}: a store cannot be written there, because this storage, or the library for it that is installed, does "
        "not refuse to replace a file, so two writers could undo each other's work: update the library (for S3 that is "
        "s3fs), or write to a folder and copy that there"
    )
    system, path = storage_of(url)
    if url.startswith(("file://", "local://")):  # fsspec writes these in place, and looks before it writes
        raise StorageError(f"{url}: a store in a folder is written by the path of the folder: give {path}")
    accepted = inspect.signature(system.pipe_file).parameters
    if "mode" not in accepted and not any(p.kind is p.VAR_KEYWORD for p in accepted.values()):
        raise StorageError(why)
    trial = f"{url}/.kohya_bucket_trial-{uuid.uuid4().hex[:16]}"
    try:
        create(trial, b"first")
        with suppress(FileExistsError):
            create(trial, b"second")
            raise StorageError(why)
    finally:
        with suppress(FileNotFoundError, StorageError):
            delete(trial)


def _until_answered(problem: str, ask: Callable[[], _Answer]) -> _Answer:
    began = time.monotonic()
    for turn in range(_TRIES):
        try:
            return as_os_error(ask)
        except _ANSWERS:
            raise
        except OSError as error:
            why = " ".join(str(error.strerror or error).split())[:300] or type(error).__name__
            if isinstance(error, PermissionError) or "Credential" in type(error.__cause__).__name__:
                raise StorageError(f"{problem}: {why}: check your access to it") from error
            if turn == _TRIES - 1:
                spent = time.monotonic() - began
                raise StorageError(
                    f"{problem}: {why} ({_TRIES} tries in {spent:.0f} s): check the address, or try again later"
                ) from error
        time.sleep(_FIRST_WAIT * 2**turn * _chance.uniform(0.5, 1.0))
    raise AssertionError


_GAP = 1 << 15  # bytes between two ranges that are read for nothing, to save a request
_MOST = 16 << 20  # bytes of one request


def merged(ranges: Sequence[Range]) -> list[tuple[Range, list[int]]]:
    """Fewer, larger ranges to request, each with the positions of the ranges that lie in it."""
    requests: list[tuple[Range, list[int]]] = []
    for k in sorted(range(len(ranges)), key=lambda k: ranges[k]):
        part = ranges[k]
        if requests:
            last, inside = requests[-1]
            stop = max(last.stop, part.stop)
            if last.url == part.url and part.start <= last.stop + _GAP and stop - last.start <= _MOST:
                requests[-1] = (last._replace(stop=stop), [*inside, k])
                continue
        requests.append((part, [k]))
    return requests


def read_merged(ranges: Sequence[Range]) -> list[memoryview]:
    """The bytes of each range, writable, by few requests. Raises as `read_ranges`."""
    requests = merged(ranges)
    contents: list[memoryview] = [memoryview(b"")] * len(ranges)
    for (whole, inside), data in zip(requests, read_ranges([whole for whole, _ in requests]), strict=True):
        view = memoryview(bytearray(data))
        for k in inside:
            contents[k] = view[ranges[k].start - whole.start : ranges[k].stop - whole.start]
    return contents


_BUFFER = 1 << 16
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):[/\\]")  # one letter is a drive


class RemotePath(os.PathLike[str]):
    """A file or folder at an address. Folders need not be made: they are prefixes of names.

    The methods are those of `Path`; they raise `StorageError` where the storage fails for good.
    """

    def __init__(self, url: str) -> None:
        scheme, _, path = url.partition("://")
        root = "/" * path.startswith("/")  # of file:///folder
        self.url = f"{scheme}://{root}{'/'.join(part for part in path.split('/') if part)}"

    def __fspath__(self) -> str:
        return self.url

    __str__ = __fspath__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and other.url == self.url

    def __hash__(self) -> int:
        return hash(self.url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    def stat(self) -> SimpleNamespace:
        """Only `st_size`."""
        return SimpleNamespace(st_size=length(self.url))

    def is_file(self) -> bool:
        with suppress(FileNotFoundError):
            self.stat()
            return True
        return False

    def is_dir(self) -> bool:
        return bool(listing(self.url))

    def read_bytes(self) -> bytes:
        return read_ranges([Range(self.url, 0, length(self.url))])[0]

    def mkdir(self, **_: Any) -> None:
        pass

    def unlink(self) -> None:
        delete(self.url)


StorePath: TypeAlias = "Path | RemotePath"


def as_given(text: str | os.PathLike[str]) -> StorePath:
    """A `RemotePath` of an address, else a `Path`. Raises `LatentStoreError` for an address with one slash."""
    name = os.fspath(text)
    if is_url(name):
        return RemotePath(name)
    if scheme := _ONE_SLASH.match(name):
        raise LatentStoreError(
            f"{name}: an address begins with {scheme[1]}://, and a Path drops one of the two slashes: give it as text"
        )
    return Path(text)


def place_of(root: str | os.PathLike[str]) -> StorePath:
    """A `RemotePath` of an address, else an absolute `Path`."""
    place = as_given(root)
    return place if isinstance(place, RemotePath) else Path(os.path.abspath(place))


def is_there(path: StorePath) -> bool:
    """Whether the path exists. Raises `UnreadableError` or `StorageError` where that cannot be told."""
    if isinstance(path, RemotePath):
        return path.is_file() or path.is_dir()
    with suppress(FileNotFoundError), reading(path):
        path.stat()
        return True
    return False


def sizes_in(folder: StorePath, ending: str) -> dict[str, int]:
    """Name -> length in bytes of the files in a folder that end so and are not hidden; empty if there is no folder."""
    if isinstance(folder, RemotePath):
        files = listing(folder.url).items()
        return {name: nbytes for name, nbytes in files if name.endswith(ending) and name[0] != "."}
    sizes = {}
    with suppress(FileNotFoundError), reading(folder), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(ending) and entry.name[0] != ".":
                with suppress(FileNotFoundError):  # removed by another process since it was listed
                    sizes[entry.name] = entry.stat().st_size
    return sizes


def write_new(path: StorePath, parts: Iterable[Any]) -> None:
    """Write a file under a new name, whole or not at all. Raises `LatentStoreError` as `write_file`; in object storage
    `StorageError`, or `FileExistsError` if the name is taken."""
    if isinstance(path, RemotePath):
        create(path.url, b"".join(parts))
    elif os.path.islink(path):  # it would redirect the file
        raise LatentStoreError(f"cannot write {path}: it is a link to what is not there: remove it")
    else:
        write_file(path, parts)


def second_look(path: StorePath, look: Callable[[], _Answer]) -> _Answer:
    """The result of `look` at a file. In object storage a damaged file is read once more: the damage may have happened
    on the way."""
    try:
        return look()
    except LatentStoreError:
        if not isinstance(path, RemotePath):
            raise
    return look()


def open_to_read(path: StorePath) -> BinaryIO:
    """A seekable file."""
    return io.BufferedReader(RawFile(_Pieces(path.url)), _BUFFER) if isinstance(path, RemotePath) else open_input(path)


class _Pieces:
    """A file in object storage, read in pieces."""

    def __init__(self, url: str) -> None:
        self._url, self.length = url, length(url)

    def read_at(self, offset: int, length: int) -> bytes:
        return read_ranges([Range(self._url, offset, min(offset + length, self.length))])[0]
