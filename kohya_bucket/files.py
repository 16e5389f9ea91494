"""Files that are there whole or not at all: written to a temporary sibling, synced, renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from kohya_bucket.errors import KohyaBucketError, LatentStoreError, reading, why_not_written
from kohya_bucket.inputs import open_input, read_input

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future


_Result = TypeVar("_Result")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{12}\.tmp", re.DOTALL)
MADE_BY = "made by kohya_bucket"  # in the beginning of pages and pictures, by which they are known as ours
TEMPORARY_AGE = 3600.0  # seconds after which a temporary file counts as abandoned
_LONGEST = 255 - len("..0123456789ab.tmp")  # bytes of a name that can have a temporary sibling of its own name
_RETRY_SECONDS = 2.0
_HELD_SECONDS = 5.0  # without which a process that holds a claim counts as dead; it needs a few milliseconds
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
        with suppress(FileNotFoundError):
            with reading(path):
                mode = path.stat().st_mode
            os.chmod(temporary, stat.S_IMODE(mode))
        if sync:
            with open(temporary, "rb+") as written:
                os.fsync(written.fileno())
        _rename_over(temporary, path)
        if sync:
            _sync_directory(path.parent)
    finally:
        with suppress(OSError):
            temporary.unlink()


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

    Of any number of processes that do this to one file, on whatever machines, each works on what the one before it
    made: nothing of either is lost. It is tried again where another was faster, so `change` may be called many times.

    Raises:
        LatentStoreError: as `write_file`, with the reason that `why` gives; or the file has more than 1 GiB.
        UnreadableError: it cannot be read now.
    """
    target = Path(os.path.realpath(path))
    try:
        while True:
            before = _content(target)
            after = change(before)
            if after == before:  # or else a state could come back while its claim is being removed
                return
            try:
                with _Claims(target) as claims, replacing(target, sync=sync) as temporary:
                    with open(temporary, "xb") as out:
                        out.write(after)
                    claims.take(before, temporary.name)
                return
            except _PassedOverError:
                continue
            except FileNotFoundError:  # another took this one for dead, and its temporary file away
                if not target.parent.is_dir():
                    raise
    except OSError as error:
        raise LatentStoreError(f"cannot write {path}: {why(error)}") from error


def _content(path: Path) -> bytes | None:
    with suppress(FileNotFoundError), reading(path), _patiently(lambda: open_input(path)) as file:
        if os.fstat(file.fileno()).st_size > _MOST_UPDATED:
            raise LatentStoreError(f"{path} has more than {_MOST_UPDATED >> 30} GiB, so it is left as it is: move it")
        return file.read()
    return None


class _PassedOverError(Exception):
    """The file has changed by now."""


class _Claims:
    """The right to replace one state of a file, which one process has at a time.

    A process that is about to replace a state makes a file that is named by that state, so that only one process can
    make it, and writes the name of its temporary file into it; then it checks that the state is still the same, and
    renames. The claim of a dead process is inherited in the same way, by a file that is named by that claim. A process
    that only seemed dead cannot rename any more, since its temporary file is removed first. So at any time at most one
    process can replace a state, whatever clocks say, and without locks of the file system. The one case that is not
    covered: a file that another process changes, and changes back to the last byte, within the milliseconds of a
    claim.
    """

    def __init__(self, target: Path) -> None:
        self._target, self._own, self._replaced = target, list[Path](), False

    def __enter__(self) -> _Claims:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # Those to a state that is still there may be inherited by somebody: they stay, for `remove_leftovers`.
        if kind is None or self._replaced:
            for claim in self._own:
                with suppress(OSError):
                    _patiently(claim.unlink)

    def take(self, before: bytes | None, holder: str) -> None:
        """Return once `holder`, a temporary file beside, may be renamed; `_PassedOverError` where it may not."""
        key, inherited = _digest(os.fsencode(self._target.name), before or b"", bytes([before is None])), None
        while True:
            claim = _sibling(self._target, key)
            try:
                with open(claim, "xb") as out:
                    self._own.append(claim)
                    out.write(os.fsencode(holder))
                if inherited is not None:  # of one that had not said its name
                    self._fence(_said(inherited) or "")
                if _sibling(self._target, _digest(key.encode())).exists():  # this one had not, for too long
                    raise _PassedOverError
                break
            except FileExistsError:
                other = self._wait_for(claim)
            except PermissionError:  # Windows: it is being removed
                if os.name != "nt":
                    raise
                other = None
            if other is not None:
                inherited = None if other else claim
                key = _digest(key.encode(), os.fsencode(other)) if other else _digest(key.encode())
        if _content(self._target) != before:
            self._replaced = True
            raise _PassedOverError

    def _wait_for(self, claim: Path) -> str | None:
        """Whose claim is to be inherited, "" if it does not say; None where it is gone."""
        deadline = time.monotonic() + _HELD_SECONDS
        while True:
            other = _said(claim)
            if other is None or (other and not (claim.parent / other).exists()):
                return other
            if time.monotonic() > deadline:
                self._fence(other)
                return other
            time.sleep(0.005)

    def _fence(self, holder: str) -> None:
        if final_name(holder):
            (self._target.parent / holder).unlink(missing_ok=True)


def _said(claim: Path) -> str | None:
    with suppress(FileNotFoundError):
        text = os.fsdecode(_patiently(lambda: read_input(claim, 1 << 12)))
        return text if final_name(text) else ""
    return None


def _digest(*parts: bytes) -> str:
    state = hashlib.blake2b(digest_size=6)
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()


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
        if target.exists() and not target.is_file():
            _fill(target, content)
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
    for folder, known in names.items():
        old: list[tuple[float, str]] = []
        with suppress(OSError), os.scandir(folder) as found:
            for entry in found:
                if final_name(entry.name) in known:
                    with suppress(OSError):
                        old.append((entry.stat().st_mtime, entry.path))
        for written, file in sorted(old):  # what is to be renamed before the claim to do so
            if time.time() - written > TEMPORARY_AGE:
                with suppress(OSError):
                    os.unlink(file)
                    removed += 1
    return removed


def user_cache() -> Path:
    """The user's folder for what can be made again."""
    windows = os.name == "nt"
    base = os.environ.get("LOCALAPPDATA" if windows else "XDG_CACHE_HOME")
    return Path(base or Path.home() / ("AppData/Local" if windows else ".cache")) / "kohya_bucket"


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
