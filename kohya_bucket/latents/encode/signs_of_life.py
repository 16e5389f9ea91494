"""Which processes that share a folder are alive: each touches a file of its own there while it runs.

Ages are differences between times that the same file system gave, so clocks of different machines need not agree.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from kohya_bucket.errors import StorageError
from kohya_bucket.latents.remote.remote_path import Place, RemotePath

__all__ = ["SignsOfLife"]

_TRIES = 20


class SignsOfLife:
    """One process' own files in a shared folder, and what those of the others say.

    Args:
        folder: shared by all processes; made if missing.
        stale_after: seconds without a sign of life after which a process counts as dead.

    Attributes:
        owner: this process' name.
        alive: the file that is touched; it says which process of which machine this is.
        name: a file with `owner` in it.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Place, stale_after: float) -> None:
        self.folder = folder
        self.owner = uuid.uuid4().hex[:16]
        self.alive = folder / f"{self.owner}.alive"
        self.name = folder / f"{self.owner}.name"
        self._stale_after = stale_after
        self._stop = threading.Event()
        self._pulse = threading.Thread(target=self._beat, name="kohya-bucket-alive", daemon=True)
        try:
            self.appear()
        except OSError:
            self.vanish()
            raise

    def start(self) -> None:
        """Give signs of life from now on."""
        self._pulse.start()

    def stop(self) -> None:
        """Give no more."""
        self._stop.set()
        self._pulse.join()

    def appear(self) -> None:
        """Make the folder and this process' files; again where the last of an earlier run just clears it away."""
        if isinstance(self.alive, RemotePath):
            self.alive.put(f"{_node()} {os.getpid()}")
            return
        for left in reversed(range(_TRIES)):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                unborn = self.alive.with_suffix(".unborn")
                unborn.write_text(f"{_node()} {os.getpid()}", encoding="utf-8")
                os.replace(unborn, self.alive)
                self.alive.with_suffix(".name").write_text(self.owner, encoding="utf-8")
                return
            except (FileNotFoundError, PermissionError) as error:
                # Windows refuses what is being removed, as it refuses what is forbidden
                if not left or (isinstance(error, PermissionError) and os.name != "nt"):
                    raise
                time.sleep(0.02)

    def vanish(self) -> None:
        """Remove this process' files, and the folder if nothing else is in it."""
        for kind in ("unborn", "alive", "name", "clock"):
            with suppress(OSError, StorageError):
                (self.folder / f"{self.owner}.{kind}").unlink()
        if isinstance(self.folder, Path):
            with suppress(OSError):
                self.folder.rmdir()

    def now(self) -> float:
        """The time, as the file system of the folder gives it."""
        clock = self.folder / f"{self.owner}.clock"
        with suppress(OSError):
            if isinstance(clock, RemotePath):
                clock.put("")
            else:
                clock.touch()
            return clock.stat().st_mtime
        return time.time()

    def is_fresh(self, path: Place) -> bool:
        """Whether a file was changed lately. `OSError` if there is none."""
        return self.now() - path.stat().st_mtime < self._stale_after

    def living(self) -> set[str]:
        """Other processes that gave a sign of life lately and, on this machine, still run."""
        now = self.now()
        ages, processes = {}, {}
        with suppress(FileNotFoundError):
            for path in self.folder.glob(f"{16 * '[0-9a-f]'}.alive"):
                with suppress(OSError):
                    ages[path.stem] = path.stat().st_mtime
                    processes[path.stem] = path.read_text(encoding="utf-8")
        ages.pop(self.owner, None)
        return {o for o, then in ages.items() if now - then < self._stale_after and not _is_dead(processes.get(o, ""))}

    def _beat(self) -> None:
        while not self._stop.wait(min(2.0, self._stale_after / 5)):
            with suppress(OSError, StorageError):
                try:
                    if isinstance(self.alive, RemotePath):
                        self.appear()
                    else:
                        os.utime(self.alive)
                except FileNotFoundError:  # see `WorkBoard._claim`
                    self.appear()


def _node() -> str:
    """This machine, and on Linux the space its process numbers count in (containers have their own)."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()}{space}".replace(" ", "_")


def _is_dead(process: str) -> bool:
    """Whether a process of this machine is known to have ended; False where that cannot be told."""
    node, _, pid = process.partition(" ")
    if os.name == "nt" or node != _node() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False
