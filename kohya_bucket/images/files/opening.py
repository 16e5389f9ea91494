"""Open files for reading, alone or many beside each other.

Opening a file walks its whole path; beside an open folder, only the rest of it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

__all__ = ["READING", "beside_each_other"]

# A named pipe that happens to be called x.png must not block; Windows must not translate line ends.
READING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags for `os.open`."""

_HAS_FOLDERS = os.open in os.supports_dir_fd
# Where there is O_PATH, a folder that may be passed through but not listed will do.
_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | getattr(os, "O_DIRECTORY", 0)
_MANY = 64


@contextlib.contextmanager
def beside_each_other(paths: Sequence[str]) -> Iterator[tuple[Sequence[str], int | None]]:
    """(names, dir_fd): `os.open(names[i], flags, dir_fd=dir_fd)` opens `paths[i]`.

    Few paths, paths without a common folder, and those of a system that cannot do this stay as they are.
    """
    names, folder = _in_common_folder(paths) if _HAS_FOLDERS and len(paths) >= _MANY else (paths, "")
    try:
        fd = os.open(folder, _FOLDER) if folder else None
    except OSError:
        names, fd = paths, None
    try:
        yield names, fd
    finally:
        if fd is not None:
            os.close(fd)


def _in_common_folder(paths: Sequence[str]) -> tuple[Sequence[str], str]:
    start = os.path.commonprefix(list(paths))  # noqa: RUF071 - by characters: cut at a slash below
    folder = start[: start.rfind("/") + 1]
    names = [path[len(folder) :] for path in paths]
    # "/b" of "a//b": opened as it stands, it would be another file. (A path with a NUL cannot be opened at all.)
    if "\0/" in "\0" + "\0".join(names):
        return paths, ""
    return names, folder
