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
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kohya_bucket.errors import KohyaBucketError, LatentStoreError, why_not_written

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future


_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp", re.DOTALL)
MADE_BY = "made by kohya_bucket"  # in the beginning of pages and pictures, by which they are known as ours
TEMPORARY_AGE = 3600.0  # seconds after which nobody writes a temporary file any more
_LONGEST = 255 - len("..0123456789ab.tmp")  # bytes of a name that can have a temporary sibling of its own name
_RETRY_SECONDS = 2.0


def final_name(temporary: str) -> str:
    """The name that a temporary file of ours, by its name, is to get; "" for all other names."""
    ours = _TEMPORARY.fullmatch(temporary)
    return ours[1] if ours else ""


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """A hidden sibling to write into, which takes the place of `path` in the end.

    Until the rename nothing is seen under `path`; after it, everything. A crash leaves at most the sibling.

    Raises:
        OSError: as whatever the file system refuses.
    """
    name = path.name if len(os.fsencode(path.name)) <= _LONGEST else path.stem[:40]
    temporary = path.with_name(f".{name}.{uuid.uuid4().hex[:12]}.tmp")  # no other process or thread uses it
    try:
        yield temporary
        if sync:
            with open(temporary, "rb+") as written:
                os.fsync(written.fileno())
        _rename_over(temporary, path)
        if sync:
            _sync_directory(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


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


def make_folder(path: Path) -> None:
    """Make a folder and those above it, if they are not there.

    Raises:
        LatentStoreError: it cannot be made.
    """
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


def replace_file(path: str | os.PathLike[str], content: bytes | Callable[[str], object]) -> None:
    """Put `content`, or what `content(temporary)` makes, in the place of a file that a user named.

    Readers see the old or the new one, whole, whatever interrupts this. Folders are made, links are followed, a file's
    permissions stay. What is no file (a pipe, /dev/stdout) is written to.

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
        if target.exists() and not target.is_file():
            _fill(target, content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_file() and not os.access(target, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with replacing(target) as temporary:
            _fill(temporary, content)
            with suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
    except OSError as error:
        raise KohyaBucketError(f"{path}: cannot be written: {why_not_written(error)}") from None


def _fill(path: Path, content: bytes | Callable[[str], object]) -> None:
    if callable(content):
        content(os.fspath(path))
        return
    with open(path, "wb") as out:
        out.write(content)


def remove_leftovers(paths: Iterable[Path]) -> int:
    """Remove the temporary files that writers of `paths` left when they were killed; returns how many.

    Each folder is listed once. Files of the last hour stay: somebody may be writing them.
    """
    names: dict[Path, set[str]] = {}
    for path in paths:
        names.setdefault(path.parent, set()).add(path.name)
    removed = 0
    for folder, known in names.items():
        with suppress(OSError), os.scandir(folder) as found:
            for entry in found:
                if final_name(entry.name) in known:
                    with suppress(OSError):
                        if time.time() - entry.stat().st_mtime > TEMPORARY_AGE:
                            os.unlink(entry.path)
                            removed += 1
    return removed


def user_cache() -> Path:
    """The user's folder for what can be made again."""
    windows = os.name == "nt"
    base = os.environ.get("LOCALAPPDATA" if windows else "XDG_CACHE_HOME")
    return Path(base or Path.home() / ("AppData/Local" if windows else ".cache")) / "kohya_bucket"


def _rename_over(source: Path, target: Path) -> None:
    """`os.replace`, tried again for a while where Windows refuses because a reader has the target open."""
    deadline = time.monotonic() + _RETRY_SECONDS
    while True:
        try:
            os.replace(source, target)
            return
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
