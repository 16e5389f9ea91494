"""Object storage, asked until it answers: list, read ranges, put if absent, delete; and an address used as a `Path` is.

A request that fails is made again after a while that doubles each time, with chance in it, so that the processes of a
cluster do not all come back at one instant. What says that a file is absent, or there already, is an answer.
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
_MOST_PUT = 5 << 30  # bytes in one request; parts of a file would stay, unseen and paid for, when the writer dies
_FIRST_WAIT = 0.2  # seconds; up to 6.4, so 6 s to 13 s in all
_chance = random.SystemRandom()  # changes nothing of what a trainer draws, and forked processes wait apart
_ANSWERS = (FileNotFoundError, FileExistsError)
_Answer = TypeVar("_Answer")


def storage_of(url: str) -> tuple[Any, str]:
    """As `images.remote.storage_of`; but a client for S3 asks once, or its tries and waits would multiply with ours."""
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
    """Length in bytes of the files directly below an address, by name; none where there is no such folder."""
    system, path = storage_of(url)

    def ask() -> list[dict[str, Any]]:
        system.invalidate_cache(path)  # other processes write there
        try:
            return list(system.ls(path, detail=True))
        except FileNotFoundError:
            return []

    found = _until_answered(f"{url}: cannot be listed", ask)
    return {
        info["name"].rstrip("/").rpartition("/")[2]: int(info["size"] or 0) for info in found if info["type"] == "file"
    }


def length(url: str) -> int:
    """Bytes of a file. Raises `FileNotFoundError` where there is none."""
    system, path = storage_of(url)

    def ask() -> dict[str, Any]:
        system.invalidate_cache(path)
        return dict(system.info(path))

    info = _until_answered(f"{url}: cannot be read", ask)
    if info["type"] != "file":
        raise FileNotFoundError(f"{url} is not a file")
    return int(info["size"] or 0)


def read_ranges(ranges: Sequence[Range]) -> list[bytes]:
    """The bytes of each range, asked for at the same time where the storage's library can; only what failed again.

    Raises `FileNotFoundError` if a file does not exist, `StorageError` if a range cannot be read, or is too short.
    """
    if not ranges:
        return []
    out: list[bytes] = [b""] * len(ranges)
    left = [k for k, part in enumerate(ranges) if part.stop > part.start]
    systems = [storage_of(part.url) for part in ranges]

    def take(answers: Sequence[Any]) -> BaseException | None:
        problem: BaseException | None = None
        for k, answer in zip(list(left), answers, strict=True):
            if isinstance(answer, BaseException):
                problem = answer
            elif answer is None or len(answer) != ranges[k].stop - ranges[k].start:
                got = len(answer or b"")
                problem = OSError(f"{ranges[k].url} gave {got} bytes of {ranges[k].stop - ranges[k].start}")
            else:
                out[k] = answer
                left.remove(k)
        return problem

    def ask() -> None:
        problem = take(systems[0][0].cat_ranges(
            [systems[k][1] for k in left], [ranges[k].start for k in left], [ranges[k].stop for k in left],
            on_error="return",
        ))  # fmt: skip
        if problem is not None:
            raise problem

    if left:
        _until_answered(f"{ranges[left[0]].url}: cannot be read", ask)
    return out


def create(url: str, data: bytes) -> None:
    """Put a file there, whole, if there is none or the same; see `check_exclusive`. Raises `FileExistsError` if there
    is another one, of somebody else, and `StorageError` if it cannot be written."""
    system, path = storage_of(url)
    whole = {"chunksize": _MOST_PUT} if _is_s3(system) else {}

    def ask() -> None:
        try:
            system.pipe_file(path, data, mode="create", **whole)
        except FileExistsError:
            # of an earlier try whose answer was lost, so that a listing from before does not have it
            system.invalidate_cache(path)
            if bytes(system.cat_file(path)) != data:
                raise

    try:
        _until_answered(f"{url}: cannot be written", ask)
    except FileNotFoundError as error:
        raise StorageError(f"{url}: cannot be written, because there is no such bucket or folder ({error})") from error


def delete(url: str) -> None:
    """Raises `FileNotFoundError` where there is no such file, as far as the storage tells."""
    system, path = storage_of(url)
    _until_answered(f"{url}: cannot be deleted", lambda: system.rm_file(path))


@functools.lru_cache(maxsize=64)
def check_exclusive(url: str) -> None:
    """Raise `StorageError` unless the storage refuses to replace a file when asked to (on S3: If-None-Match), so that
    two writers cannot undo each other's work. It is tried once."""
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
            why = " ".join(str(error).split())[:300] or type(error).__name__
            if isinstance(error, PermissionError) or "Credential" in type(error.__cause__).__name__:
                raise StorageError(f"{problem}: {why}: check your access to it") from error
            if turn == _TRIES - 1:
                spent = time.monotonic() - began
                raise StorageError(
                    f"{problem}: {why} ({_TRIES} tries in {spent:.0f} s): check the address, or try again later"
                ) from error
        time.sleep(_FIRST_WAIT * 2**turn * _chance.uniform(0.5, 1.0))
    raise AssertionError


_GAP = 1 << 15  # bytes that are read for nothing where that spares a request
_MOST = 16 << 20  # bytes of one request


def merged(ranges: Sequence[Range]) -> list[tuple[Range, list[int]]]:
    """Ranges to ask for, and which of the given ones lie in each. Every given one lies in exactly one."""
    order = sorted(range(len(ranges)), key=lambda k: ranges[k])
    out: list[tuple[Range, list[int]]] = []
    for k in order:
        part = ranges[k]
        if out:
            last, inside = out[-1]
            stop = max(last.stop, part.stop)
            if last.url == part.url and part.start <= last.stop + _GAP and stop - last.start <= _MOST:
                out[-1] = (last._replace(stop=stop), [*inside, k])
                continue
        out.append((part, [k]))
    return out


def read_merged(ranges: Sequence[Range]) -> list[memoryview]:
    """The bytes of each range, which may be written into. Raises as `read_ranges`."""
    groups = merged(ranges)
    out: list[memoryview] = [memoryview(b"")] * len(ranges)
    for (whole, inside), data in zip(groups, read_ranges([whole for whole, _ in groups]), strict=True):
        view = memoryview(bytearray(data))
        for k in inside:
            out[k] = view[ranges[k].start - whole.start : ranges[k].stop - whole.start]
    return out


_BUFFER = 1 << 16
_ONE_SLASH = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):[/\\]")  # one letter is a drive


class RemotePath(os.PathLike[str]):
    """A file or folder at an address. There are no folders to make: they are beginnings of names.

    Methods are those of `Path`, and raise `StorageError` where the storage fails for good.
    """

    def __init__(self, url: str) -> None:
        scheme, _, rest = url.partition("://")
        first = "/" * rest.startswith("/")  # of file:///folder
        self.url = f"{scheme}://{first}{'/'.join(part for part in rest.split('/') if part)}"

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
        """With `st_size` alone."""
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
    """An address as such, anything else as a path. Raises `LatentStoreError` for an address with one slash."""
    given = os.fspath(text)
    if is_url(given):
        return RemotePath(given)
    if found := _ONE_SLASH.match(given):
        raise LatentStoreError(
            f"{given}: an address begins with {found[1]}://, and a Path leaves one of the two slashes: give it as text"
        )
    return Path(text)


def place_of(root: str | os.PathLike[str]) -> StorePath:
    """An address as such, anything else as an absolute path."""
    place = as_given(root)
    return place if isinstance(place, RemotePath) else Path(os.path.abspath(place))


def is_there(path: StorePath) -> bool:
    """Whether there is anything of that name. Raises `UnreadableError` or `StorageError` where that cannot be told."""
    if isinstance(path, RemotePath):
        return path.is_file() or path.is_dir()
    with suppress(FileNotFoundError, NotADirectoryError), reading(path):
        path.stat()
        return True
    return False


def sizes_in(folder: StorePath, ending: str) -> dict[str, int]:
    """Name -> length in bytes of the files in a folder that end so and are not hidden; none where it is absent."""
    if isinstance(folder, RemotePath):
        there = listing(folder.url).items()
        return {name: nbytes for name, nbytes in there if name.endswith(ending) and name[0] != "."}
    sizes = {}
    with suppress(FileNotFoundError), reading(folder), os.scandir(folder) as found:
        for entry in found:
            if entry.name.endswith(ending) and entry.name[0] != ".":
                with suppress(FileNotFoundError):  # removed by another process since it was listed
                    sizes[entry.name] = entry.stat().st_size
    return sizes


def write_new(path: StorePath, parts: Iterable[Any]) -> None:
    """Write a file under a name of its own, whole or not at all. Raises `LatentStoreError` as `write_file`;
    in object storage `StorageError`, or `FileExistsError` if there is one."""
    if isinstance(path, RemotePath):
        create(path.url, b"".join(parts))
    elif os.path.islink(path):  # it would decide where else that is written
        raise LatentStoreError(f"cannot write {path}: it is a link to what is not there: remove it")
    else:
        write_file(path, parts)


def second_look(path: StorePath, look: Callable[[], _Answer]) -> _Answer:
    """What `look` reads of a file. Of object storage it is read once more before it counts as damaged: what is wrong
    may have happened on the way."""
    try:
        return look()
    except LatentStoreError:
        if not isinstance(path, RemotePath):
            raise
    return look()


def open_to_read(path: StorePath) -> BinaryIO:
    """A file to read from, at any position."""
    return io.BufferedReader(RawFile(_Pieces(path.url)), _BUFFER) if isinstance(path, RemotePath) else open_input(path)


class _Pieces:
    """A file in object storage that is read in pieces."""

    def __init__(self, url: str) -> None:
        self._url, self.length = url, length(url)

    def read_at(self, offset: int, length: int) -> bytes:
        return read_ranges([Range(self._url, offset, min(offset + length, self.length))])[0]
