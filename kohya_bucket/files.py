"""Files that are there whole or not at all: written to a temporary sibling, synced, renamed."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from kohya_bucket.errors import KohyaBucketError, LatentStoreError, reading, why_not_written
from kohya_bucket.inputs import open_input

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future


_Result = TypeVar("_Result")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp", re.DOTALL)
MADE_BY = "made by kohya_bucket"  # in the beginning of pages and pictures, by which they are known as ours
TEMPORARY_AGE = 3600.0  # seconds after which a temporary file counts as abandoned
_LONGEST = 255 - len("..0123456789ab.tmp")  # bytes of a name that can have a temporary sibling of its own name
_RETRY_SECONDS = 2.0
_LOCK = "0" * 12  # in the place of a temporary file's random digits
_HELD_SECONDS = 5.0  # after which a process that holds a lock counts as dead; it needs a few milliseconds
_MOST_UPDATED = 1 << 30  # bytes


def final_name(temporary: str) -> str:
    """The name that a temporary file of ours, by its name, is to get; "" for all other names."""
    ours = _TEMPORARY.fullmatch(temporary)
    return ours[1] if ours else ""


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """A hidden sibling to write into, which takes the place of `path` in the end.

    Until the rename nothing is seen under `path`; after it, everything. A crash leaves at most the sibling. Links are
    followed, and the permissions of a file that was there stay.

    Raises:
        OSError: as whatever the file system refuses.
        UnreadableError: what is there cannot be told.
    """
    path = Path(os.path.realpath(path))
    temporary = _sibling(path, uuid.uuid4().hex[:12])  # no other process or thread uses it
    try:
        yield temporary
        _keep_mode(temporary, path)
        if sync:
            with open(temporary, "rb+") as written:
                os.fsync(written.fileno())
        _rename_over(temporary, path)
        if sync:
            _sync_directory(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _keep_mode(temporary: Path, path: Path) -> None:
    with suppress(FileNotFoundError):
        with reading(path):
            mode = path.stat().st_mode
        os.chmod(temporary, stat.S_IMODE(mode))


def _sibling(path: Path, tag: str) -> Path:
    name = path.name if len(os.fsencode(path.name)) <= _LONGEST else path.stem[:40]
    return path.with_name(f".{name}.{tag}.tmp")


def write_file(path: Path, content: Iterable[Any] | Callable[[BinaryIO], object], *, sync: bool = True) -> None:
    """Write `content` (bytes-like parts, or what writes into a file) as `path`, whole or not at all.

    Args:
        sync: wait until it is on disk. Without, a process that is killed leaves the old file or the new one, and a
            power failure may leave one that is cut off; `GroupedSync` waits for many together.

    Raises:
        LatentStoreError: the disk is full, the folder is read-only, or the file is held open (Windows).
    """
    try:
        with replacing(path, sync=sync) as temporary, open(temporary, "xb") as out:
            if callable(content):
                content(out)
            else:
                out.writelines(content)
    except OSError as error:
        raise LatentStoreError(f"cannot write {path}: {why_not_written(error)}") from error


def update_file(
    path: Path, change: Callable[[bytes | None], bytes], *, sync: bool = True,
    why: Callable[[OSError], str] = why_not_written,
) -> None:  # fmt: skip
    """Put what `change` makes of a file's content (None: there is no file) in its place, whole or not at all.

    Of any number of processes that do this to one file, each works on what the one before it made: nothing of either
    is lost. It is tried again where another was faster, so `change` may be called many times.

    Raises:
        LatentStoreError: as `write_file`, with the reason that `why` gives; or the file has more than 1 GiB.
        UnreadableError: it cannot be read now.
    """
    target = Path(os.path.realpath(path))
    try:
        while not _try_update(target, change, sync):
            pass
        if sync:
            _sync_directory(target.parent)
    except OSError as error:
        raise LatentStoreError(f"cannot write {path}: {why(error)}") from error


def _try_update(target: Path, change: Callable[[bytes | None], bytes], sync: bool) -> bool:
    """Whether it was done: else another was faster."""
    before = _content(target)
    after = change(before)
    if after == before:
        return True
    temporary = _sibling(target, uuid.uuid4().hex[:12])
    try:
        with open(temporary, "xb") as out:
            out.write(after)
            if sync:  # before the lock is taken, which is to be held for milliseconds
                out.flush()
                os.fsync(out.fileno())
        _keep_mode(temporary, target)
        return _replace_state(target, before, temporary)
    finally:
        with suppress(OSError):
            temporary.unlink()


def _content(path: Path) -> bytes | None:
    with suppress(FileNotFoundError), reading(path), _patiently(lambda: open_input(path)) as file:
        if os.fstat(file.fileno()).st_size > _MOST_UPDATED:
            raise LatentStoreError(f"{path} has more than {_MOST_UPDATED >> 30} GiB, so it is left as it is: move it")
        return file.read()
    return None


def _replace_state(target: Path, before: bytes | None, temporary: Path) -> bool:
    """Put a temporary file in the place of `target`, if nobody else does so and the content is still `before`.

    The lock is a folder beside it, into which the temporary file is moved first. A process that has it for too long
    counts as dead, and its file is removed from there. So one that only seemed dead has nothing to rename any more,
    and no two can rename a file for the same state: that holds whatever clocks say, and without locks of the system.
    """
    lock = _sibling(target, _LOCK)
    while not _is_made(lock):
        _wait_for(lock)
    held = lock / temporary.name
    try:
        _patiently(lambda: os.rename(temporary, held))
        # a lock that was taken away before anything was in it is another's by now: one of both sees the other there
        if _patiently(lambda: os.listdir(lock)) != [held.name] or _content(target) != before:
            return False
        _rename_over(held, target)
        return True
    except FileNotFoundError:
        return False
    finally:
        _release(lock, [held.name])


def _is_made(lock: Path) -> bool:
    try:
        _patiently(lock.mkdir)
        return True
    except FileExistsError:
        return False


def _wait_for(lock: Path) -> None:
    """Return once a lock is gone. If what is in it stays the same for too long, it is taken away."""
    seen: list[str] | None = None
    while True:
        try:
            now = _patiently(lambda: os.listdir(lock))
        except FileNotFoundError:
            return
        if now != seen:
            seen, deadline = now, time.monotonic() + _HELD_SECONDS
        elif time.monotonic() > deadline:
            _release(lock, seen)
            return
        time.sleep(0.005)


def _release(lock: Path, names: Iterable[str]) -> None:
    """Remove files from a lock, and the lock unless another file is in it."""
    with suppress(OSError):
        for name in names:
            _patiently(partial((lock / name).unlink, missing_ok=True))
        _patiently(lock.rmdir)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, if they are not there; `LatentStoreError` if it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LatentStoreError(f"cannot make the folder {path}: {why_not_written(error)}") from error


class GroupedSync:
    """Waits until files that were written without `sync`, and their names, are on disk: group by group.

    Files of a group are waited for on the threads of `pool`, while the caller writes the next ones.

    Args:
        pool: may have other work.
    """

    def __init__(self, pool: Executor, size: int = 64) -> None:
        self._pool, self._size = pool, size
        self._next: list[Path] = []
        self._begun: list[Path] = []
        self._waiting: list[Future[None]] = []

    def add(self, path: Path) -> None:
        """Raises `LatentStoreError` where a file of an earlier group could not be written."""
        self._next.append(path)
        if len(self._next) >= self._size:
            self._begin()

    def finish(self) -> None:
        """Wait for all. Raises as `add`."""
        self._begin()
        self._end()

    def _begin(self) -> None:
        self._end()
        self._begun, self._next = self._next, []
        self._waiting = [self._pool.submit(_sync_file, path) for path in self._begun]

    def _end(self) -> None:
        group, waiting = self._begun, self._waiting
        self._begun, self._waiting = [], []
        for future in waiting:
            future.result()
        for folder in dict.fromkeys(path.parent for path in group):
            _sync_directory(folder)


def _sync_file(path: Path) -> None:
    try:
        with suppress(FileNotFoundError), open(path, "rb+") as written:
            os.fsync(written.fileno())
    except OSError as error:
        raise LatentStoreError(f"cannot write {path}: {why_not_written(error)}") from error


def replace_file(path: str | os.PathLike[str], content: bytes | Callable[[BinaryIO], object]) -> None:
    """Put `content`, or what `content(file)` writes, in the place of a file that a user named.

    Readers see the old or the new one, whole, whatever interrupts this. Folders are made, links are followed, a file's
    permissions stay. What is not a file (a pipe, /dev/stdout) is written to.

    Raises:
        KohyaBucketError: the disk is full, the folder or the file is read-only, or held open by a program (Windows).
    """
    try:
        target = Path(os.path.realpath(path))
    except ValueError as error:  # a name that no file can have
        raise KohyaBucketError(f"{path}: cannot be written: {error}") from None
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if Path(path).exists() and not target.is_file():  # what /dev/stdout leads to may have no path
            _fill(Path(path), content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with replacing(target) as temporary:
            _fill(temporary, content)
    except OSError as error:
        raise KohyaBucketError(f"{path}: cannot be written: {why_not_written(error)}") from None


def _fill(path: Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    with open(path, "wb") as out:
        if callable(content):
            content(out)
        else:
            out.write(content)


def remove_leftovers(paths: Iterable[Path]) -> int:
    """Remove the temporary files that writers of `paths` left when they were killed; returns how many.

    Each folder is listed once. Files of the last hour stay: they may still be written.
    """
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(path.name)
    removed = 0
    for folder, expected in names.items():
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    if final_name(entry.name) in expected and time.time() - entry.stat().st_mtime > TEMPORARY_AGE:
                        if entry.is_dir(follow_symlinks=False):  # a lock
                            _release(Path(entry.path), filter(final_name, os.listdir(entry.path)))
                        else:
                            os.unlink(entry.path)
                        removed += 1
    return removed


def user_cache() -> Path:
    """The user's folder for what can be made again; `KohyaBucketError` for a user without a home, as in containers."""
    windows = os.name == "nt"
    variable = "LOCALAPPDATA" if windows else "XDG_CACHE_HOME"
    try:
        base = os.environ.get(variable) or Path.home() / ("AppData/Local" if windows else ".cache")
    except RuntimeError:
        raise KohyaBucketError(f"this user has no home folder: name one for caches with {variable}") from None
    return Path(base) / "kohya_bucket"


def _rename_over(source: Path, target: Path) -> None:
    _patiently(lambda: os.replace(source, target))


def _patiently(call: Callable[[], _Result]) -> _Result:
    """Tried again for a while where Windows refuses, because another has the file open, or just now removes it."""
    deadline = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            return call()
        except PermissionError:
            if os.name != "nt" or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _sync_directory(path: Path) -> None:
    """Make a rename durable. Windows cannot sync a directory, and does not need it."""
    if os.name == "nt":
        return
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
