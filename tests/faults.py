"""System calls that fail now and then, as on a network folder or with too few open files."""

import builtins
import errno
import io
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PASSING = [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT]


def _path_of(fd: int) -> Path | None:
    """The file behind a descriptor, on Linux."""
    try:
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return None


class Faults:
    """Counts what is asked of files under `roots`; the calls whose numbers are in `failing` fail with `code`.

    Calls are: opening a file to read, reading a piece of it, mapping it, its status, listing a folder.
    """

    def __init__(self, *roots: Path) -> None:
        self.roots, self.calls = tuple(map(os.fspath, roots)), 0
        self.failing: range = range(0)
        self.code, self.failed = errno.EIO, list[str]()

    def call(self, name: Any) -> None:
        if isinstance(name, (str, os.PathLike)) and os.fspath(name).startswith(self.roots):
            self.calls += 1
            if self.calls in self.failing:
                self.failed.append(os.fspath(name))
                raise OSError(self.code, os.strerror(self.code), os.fspath(name))

    @contextmanager
    def at(self, failing: range, code: int) -> Iterator[None]:
        self.failing, self.code, self.calls, self.failed = failing, code, 0, []
        try:
            yield
        finally:
            self.failing = range(0)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real_open, faults = io.open, self

        class Unreliable(io.FileIO):
            def readinto(self, buffer: Any) -> int | None:
                faults.call(_path_of(self.fileno()))
                return super().readinto(buffer)

            def readall(self) -> bytes:
                faults.call(_path_of(self.fileno()))
                return super().readall()

        def opened(file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:
            if mode != "rb":
                return real_open(file, mode, *args, **more)
            faults.call(file)
            return io.BufferedReader(Unreliable(file))

        def of_descriptor(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(fd: int, *args: Any) -> Any:
                faults.call(_path_of(fd))
                return real(fd, *args)

            return call

        def failing(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(path: Any = ".", *args: Any, **more: Any) -> Any:
                faults.call(path)
                return real(path, *args, **more)

            return call

        class Map(mmap.mmap):
            def __new__(cls, fileno: int, *args: Any, **more: Any) -> Any:
                if fileno >= 0:
                    faults.call(_path_of(fileno))
                return super().__new__(cls, fileno, *args, **more)

        monkeypatch.setattr(builtins, "open", opened)
        monkeypatch.setattr(io, "open", opened)
        monkeypatch.setattr(mmap, "mmap", Map)
        for name in ("open", "stat", "scandir", "listdir"):
            monkeypatch.setattr(os, name, failing(getattr(os, name)))
        monkeypatch.setattr(os, "read", of_descriptor(os.read))
