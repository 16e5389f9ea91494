"""Shards that a node keeps of stores in object storage: one folder for all of its processes, with a limit in bytes.

Nothing is locked and nobody waits. A process that wants a shard claims it by creating `<shard>.<bytes>.claim`
exclusively, and what is claimed counts as if it were there. It then looks whether all fits, lets go of the shards that
were used least lately until it does, or gives its claim back. Since each looks after it has claimed, two that claim at
one instant see each other. A file is written whole and under its name or not at all; who is killed leaves a claim,
which counts for nothing once no byte came for a minute.

Only what is ours is removed: files named like shards and claims, in folders named like stores', in a folder of our own
name that holds our marker.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from kohya_bucket.errors import KohyaBucketError, LatentStoreError
from kohya_bucket.files import user_cache, write_file
from kohya_bucket.texts import one_line

__all__ = ["FOLDER_VARIABLE", "LIMIT_VARIABLE", "NodeCache"]

FOLDER_VARIABLE = "KOHYA_BUCKET_SHARDS"
LIMIT_VARIABLE = "KOHYA_BUCKET_SHARDS_GB"
_log = logging.getLogger(__name__)
_DEFAULT_GB = 20.0
_STALE = 60.0  # seconds without a byte after which a claim is a dead process'
_FOLDER = "kohya_bucket_shards"
_MARKER = "CACHEDIR.TAG"
_MARK = b"""Signature: 8a477f597d28d172789f06886806bc55
# Made by kohya_bucket, which removes shards in here to make room. See https://bford.info/cachedir/
"""
_STORE = re.compile(r"[0-9a-f]{16}")
_SHARD = re.compile(r"\d+x\d+-\w+-[0-9a-f]{16}\.safetensors")
_CLAIM = re.compile(rf"({_SHARD.pattern})\.(\d+)\.claim")


class NodeCache:
    """The shards of one store on this node.

    Args:
        address: of the store.
        root: where the folder of all stores is made; None: as the environment variable says, else the user's cache.
        limit: bytes of all stores together; None: that of the environment variable, else 20 GB; 0 keeps nothing.

    Raises:
        KohyaBucketError: the variable holds no number.
    """

    def __init__(self, address: str, root: Path | None = None, limit: int | None = None) -> None:
        self.root = Path(root or os.environ.get(FOLDER_VARIABLE) or user_cache()) / _FOLDER
        self.limit = _limit_of_environment() if limit is None else limit
        self._said = False
        self.folder = self.root / hashlib.blake2b(address.encode("utf-8"), digest_size=8).hexdigest()

    def holds(self, name: str, nbytes: int) -> bool:
        """Whether a shard is there; its file is `folder / name` then."""
        if not self.limit:
            return False
        try:
            return (self.folder / name).stat().st_size == nbytes
        except OSError:
            return False

    def used(self, name: str) -> None:
        """Say that a shard was read: those that were not go first."""
        with suppress(OSError):
            os.utime(self.folder / name)

    def discard(self, name: str) -> None:
        """Let go of a shard, e.g. of one whose bytes are not what they were."""
        with suppress(OSError):
            (self.folder / name).unlink()

    def keep(self, name: str, nbytes: int, fill: Callable[[BinaryIO, Callable[[], None]], None]) -> bool:
        """Put a shard there, unless another process is at it or there is no room; returns whether it is there.

        Args:
            fill: writes it into a file, and calls what it is given whenever bytes came. What it raises ends this, and
                nothing is kept.
        """
        if self.holds(name, nbytes):
            return True
        if nbytes > self.limit or not _SHARD.fullmatch(name):
            return False
        try:
            _make_ours(self.root)
            self.folder.mkdir(exist_ok=True)
            claim = self._claim(name, nbytes)
            if claim is None:
                return False
            try:
                if self.holds(name, nbytes):  # another process was at it, and is done since the look above
                    return True
                if not self._make_room():
                    return False
                write_file(self.folder / name, lambda file: fill(file, lambda: os.utime(claim)), sync=False)
            finally:
                with suppress(OSError):
                    claim.unlink()
        except (OSError, LatentStoreError) as error:  # a full disk, a folder that is read-only: it works without
            if not self._said:
                _log.warning("a shard is not kept on this node, and is read by requests: %s", one_line(error))
            self._said = True
            return False
        return True

    def _claim(self, name: str, nbytes: int) -> Path | None:
        path = self.folder / f"{name}.{nbytes}.claim"
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _STALE:
                _clear(path)
        try:
            with open(path, "x", encoding="utf-8"):
                return path
        except FileExistsError:
            return None

    def _make_room(self) -> bool:
        """Let go of shards until what is there and what is claimed fits; False if it does not."""
        # claims first: one that becomes a shard in between is seen twice, and never not at all
        there: dict[tuple[str, str], int] = {}
        claimed = set()
        for folder, entry in _entries(self.root):
            if claim := _CLAIM.fullmatch(entry.name):
                name, size = claim.groups()
                with suppress(OSError):
                    if time.time() - entry.stat().st_mtime > _STALE:
                        _clear(Path(entry.path))
                    else:
                        there[folder, name] = int(size)
                        claimed.add((folder, name))
        shards = []
        for folder, entry in _entries(self.root):
            if _SHARD.fullmatch(entry.name):
                with suppress(OSError):
                    found = entry.stat()
                    there[folder, entry.name] = found.st_size
                    if (folder, entry.name) not in claimed:
                        shards.append((found.st_mtime, folder, entry.name))
        total = sum(there.values())
        for _, folder, name in sorted(shards):
            if total <= self.limit:
                break
            try:
                (self.root / folder / name).unlink(missing_ok=True)
            except OSError:  # Windows: a process has it mapped
                continue
            total -= there[folder, name]
        return total <= self.limit


def _make_ours(root: Path) -> None:
    """Make the folder with our marker in it, both at once, or see that it has it.

    Raises:
        LatentStoreError: there is such a folder that we have not made.
    """
    marker = root / _MARKER
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{_FOLDER}-", dir=root.parent) as made:
            (Path(made) / "it").mkdir()
            (Path(made) / "it" / _MARKER).write_bytes(_MARK)
            with suppress(OSError):  # another process was quicker
                (Path(made) / "it").rename(root)
    try:
        ours = marker.read_bytes() == _MARK
    except (FileNotFoundError, NotADirectoryError):
        ours = False
    if not ours:
        raise LatentStoreError(f"{root} was not made by kohya_bucket: rename it, or set {FOLDER_VARIABLE}")


def _entries(root: Path) -> list[tuple[str, os.DirEntry[str]]]:
    """(store's folder, file in it) of all stores."""
    found = []
    for folder in [folder for folder in root.iterdir() if _STORE.fullmatch(folder.name)]:
        with suppress(OSError), os.scandir(folder) as entries:
            found += [(folder.name, entry) for entry in entries]
    return found


def _clear(claim: Path) -> None:
    """Remove a dead process' claim, and what it had written."""
    name = claim.name.removesuffix(".claim").rpartition(".")[0]
    for left in [*claim.parent.glob(f".{name}.*.tmp"), claim]:
        with suppress(OSError):
            left.unlink()


def _limit_of_environment() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    try:
        gigabytes = float(text) if text else _DEFAULT_GB
        if not 0 <= gigabytes < 1e9:
            raise ValueError
    except ValueError:
        raise KohyaBucketError(
            f"{LIMIT_VARIABLE} is {text!r}, but must be a number of gigabytes, 0 to keep no shards on this node"
        ) from None
    return int(gigabytes * 1e9)
