"""What Windows refuses, on Linux: `install` makes `os` and `open` refuse it too, for files below one folder.

- A file that this or another process has open or mapped is not replaced, renamed, removed or, while it is mapped,
  truncated; nor is a folder renamed or removed in which there is one. (Python opens files without `FILE_SHARE_DELETE`.)
- A read-only file is neither replaced, removed nor opened to write.
- Text without an encoding is read and written as cp1252.
- Names that differ by letter case are one file.

Who has a file open is read from `/proc`. `tests/windows/test_refusals.py` runs the same cases on Windows itself.
"""

from __future__ import annotations

import builtins
import functools
import io
import mmap
import os
import pathlib  # noqa: F401 (before 3.11 it takes the functions of `os` for methods, if they are replaced before)
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

# Where the refusals hold, and the process of the tests: for those that it starts.
FOLDER, ROOT = "KOHYA_BUCKET_TESTS_AS_WINDOWS", "KOHYA_BUCKET_TESTS_PROCESS"

_REAL: dict[str, Any] = {
    name: getattr(os, name)
    for name in (
        "stat", "lstat", "access", "chmod", "utime", "scandir", "listdir", "open", "mkdir", "rmdir", "unlink", "remove",
        "rename", "replace", "truncate",
    )
}  # fmt: skip
_REAL["builtin open"] = builtins.open
_BY_NUMBER = shutil._use_fd_functions  # type: ignore[attr-defined]


_mapped: weakref.WeakSet[_Map] = weakref.WeakSet()


class _Map(mmap.mmap):
    """A mapping that is known to `_holders`."""

    path: str

    def __new__(cls, fileno: int, *args: Any, **options: Any) -> _Map:
        self = super().__new__(cls, fileno, *args, **options)
        if fileno >= 0:
            self.path = os.readlink(f"/proc/self/fd/{fileno}")
            _mapped.add(self)
        return self

    __hash__ = object.__hash__


def install(folder: str) -> Callable[[], None]:
    """Refuse from now on; returns what ends that."""
    below = os.path.realpath(folder) + os.sep
    there = functools.partial(_as_there, below)

    def looking(name: str) -> Callable[..., Any]:
        real = _REAL[name]

        @functools.wraps(real)
        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            try:
                return real(path, *args, **options)
            except FileNotFoundError:
                if options.get("dir_fd") is not None or (found := there(path)) == path:
                    raise
                return real(found, *args, **options)

        return call

    def making(path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        _REAL["mkdir"](there(path), mode, dir_fd=dir_fd)

    def removing(name: str) -> Callable[..., Any]:
        real = _REAL[name]

        @functools.wraps(real)
        def call(path: Any, *, dir_fd: int | None = None) -> Any:
            if dir_fd is not None:
                return real(path, dir_fd=dir_fd)
            path = there(path)
            _refuse(below, path, writable=name != "rmdir")
            return real(path)

        return call

    def moving(name: str) -> Callable[..., Any]:
        real = _REAL[name]

        @functools.wraps(real)
        def call(src: Any, dst: Any, **options: Any) -> Any:
            src, to = there(src), there(dst)
            _refuse(below, src)
            if os.fspath(to) == os.fspath(src):  # its name in other letters
                return real(src, dst, **options)
            if os.path.lexists(to):
                if name == "rename":
                    raise FileExistsError(17, "[WinError 183] as on Windows: there is such a file", os.fspath(to))
                _refuse(below, to, writable=True)
            return real(src, to, **options)

        return call

    def truncate(path: Any, length: int) -> None:
        if not isinstance(path, int):
            _refuse(below, path, mapped=True)
        _REAL["truncate"](path, length)

    def open_fd(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None:
            path = there(path)
            if flags & (os.O_WRONLY | os.O_RDWR):
                _check_writable(below, path)
            if flags & os.O_TRUNC:
                _refuse(below, path, mapped=True)
        return _REAL["open"](path, flags, mode, dir_fd=dir_fd)

    def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        options.update(zip(("buffering", "encoding", "errors", "newline", "closefd", "opener"), args, strict=False))
        if not isinstance(file, int):
            file = there(file)
            if "b" not in mode and options.get("encoding") in (None, "locale") and _is_below(below, file):
                options["encoding"] = "cp1252"
            if set(mode) & set("wa+"):
                _check_writable(below, file)
            if "w" in mode:
                _refuse(below, file, mapped=True)
        return _REAL["builtin open"](file, mode, **options)

    for name in ("stat", "lstat", "access", "chmod", "utime", "scandir", "listdir"):
        setattr(os, name, looking(name))
    os.mkdir = making
    for name in ("unlink", "remove", "rmdir"):
        setattr(os, name, removing(name))
    for name in ("rename", "replace"):
        setattr(os, name, moving(name))
    os.truncate, os.open = truncate, open_fd
    builtins.open = io.open = open_file
    mmap.mmap = _Map
    shutil._use_fd_functions = False  # type: ignore[attr-defined]  # it removes by path, as on Windows

    def undo() -> None:
        for name, real in _REAL.items():
            if name != "builtin open":
                setattr(os, name, real)
        builtins.open = io.open = _REAL["builtin open"]
        mmap.mmap = _Map.__base__
        shutil._use_fd_functions = _BY_NUMBER  # type: ignore[attr-defined]

    return undo


def _is_below(below: str, path: Any) -> bool:
    return isinstance(path, (str, bytes, os.PathLike)) and os.path.abspath(os.fsdecode(path)).startswith(below)


def _as_there(below: str, path: Any) -> Any:
    """The path as it is on disk, if there is one that differs by letter case alone."""
    if not _is_below(below, path):
        return path
    text = os.fsdecode(path)
    with suppress(OSError, ValueError):
        _REAL["lstat"](text)
        return path
    folder, name = os.path.split(os.path.abspath(text))
    folder = os.fspath(_as_there(below, folder))
    with suppress(OSError, ValueError):
        for other in _REAL["listdir"](folder):
            if other.lower() == name.lower():
                found = os.path.join(folder, other)
                return os.fsencode(found) if isinstance(path, bytes) else found
    return path


def _check_writable(below: str, path: Any) -> None:
    if _is_below(below, path):
        with suppress(FileNotFoundError, NotADirectoryError, ValueError):
            found = _REAL["stat"](path)
            if stat.S_ISREG(found.st_mode) and not found.st_mode & stat.S_IWUSR:
                raise PermissionError(13, "as on Windows: the file is read-only", os.fspath(path))


def _refuse(below: str, path: Any, *, writable: bool = False, mapped: bool = False) -> None:
    if not _is_below(below, path):
        return
    try:
        found = _REAL["lstat"](path)
    except (OSError, ValueError):
        return
    if stat.S_ISLNK(found.st_mode):
        return
    if writable:
        _check_writable(below, path)
    for process in _holders(os.path.realpath(os.fsdecode(path)), mapped_only=mapped):
        raise PermissionError(13, f"[WinError 32] as on Windows: process {process} has it open", os.fspath(path))


def _holders(real: str, *, mapped_only: bool = False) -> Iterator[int]:
    """Processes of this test that have this file, or one in this folder, open or mapped."""
    inside = real + os.sep
    mark = os.fsencode(real)
    for process in _family(int(os.environ.get(ROOT) or os.getpid())):
        with suppress(OSError):
            if not mapped_only:
                for number in _REAL["listdir"](f"/proc/{process}/fd"):
                    with suppress(OSError):
                        target = os.readlink(f"/proc/{process}/fd/{number}")
                        if target == real or target.startswith(inside):
                            yield process
            if process == os.getpid():  # without its table, which is long where torch is loaded
                for one in list(_mapped):
                    if not one.closed and (one.path == real or one.path.startswith(inside)):
                        yield process
                continue
            with _REAL["builtin open"](f"/proc/{process}/maps", "rb") as maps:
                found = maps.read()
            if mark in found:
                for line in found.splitlines():
                    target = os.fsdecode(line.split(maxsplit=5)[-1])
                    if target == real or target.startswith(inside):
                        yield process


def _family(root: int) -> list[int]:
    """A process and those that it started."""
    found = [root]
    for process in found:
        with suppress(OSError):
            for thread in _REAL["listdir"](f"/proc/{process}/task"):
                with suppress(OSError), _REAL["builtin open"](f"/proc/{process}/task/{thread}/children") as children:
                    found += map(int, children.read().split())
    return found
