"""A folder in which there is no room to write, for a while: a small file system that is full, or a limit on files."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest


class NoRoom:
    """`folder` to write in; inside `with full():` writing there fails, with a message that holds `reason`."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self._kind = kind
        self.reason = "the disk is full" if kind == "tmpfs" else r"the file is larger than .* allows"

    @contextmanager
    def full(self) -> Iterator[None]:
        if self._kind == "limit":
            import resource

            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (60, before[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)
            return
        filler = self.folder / "filler"
        try:
            with open(filler, "wb", buffering=0) as out:
                while _write(out):
                    pass
            yield
        finally:
            filler.unlink()


def _write(out: BinaryIO) -> bool:
    """Whether there was room for 4 kB more."""
    try:
        return out.write(b"x" * 4096) == 4096
    except OSError:
        return False


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on a file system of 400 kB of its own; skips where none can be mounted."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system cannot be mounted here (needs root on Linux)")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


@pytest.fixture(params=["tmpfs", "limit"])
def no_room(request: pytest.FixtureRequest, tmp_path: Path) -> NoRoom:
    """A folder that can be full, as a disk is and as a limit on the length of files makes it."""
    if request.param == "tmpfs":
        return NoRoom(request.getfixturevalue("small_disk"), "tmpfs")
    pytest.importorskip("resource", reason="this system has no limits on files")
    folder = tmp_path / "no_room"
    folder.mkdir()
    return NoRoom(folder, "limit")
