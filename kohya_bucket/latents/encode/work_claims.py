"""Handing out work among processes that share nothing but a folder: no collective, no server, no lock.

A process claims a piece of work by creating a file exclusively, which one process alone can do, on network file systems
too; it is made as a link to a file with the process' name in it, so that no claim is ever without a name. While it
lives it touches a file of its own there; when it stops, its claims count for nothing and others take them over under
the next generation's name. Files of other names are neither read nor removed. Ages are differences between times that
the same file system gave, so clocks of different machines need not agree.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kohya_bucket.errors import LatentStoreError, StorageError
from kohya_bucket.latents.remote.remote_path import Place, RemotePath, sizes_in
from kohya_bucket.latents.remote.storage import create

__all__ = ["WorkBoard"]

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


_OURS = re.compile(r"\w+\.\d+\.(claim|done)|[0-9a-f]{16}\.(alive|name|clock|unborn)")
_SECONDS = 2.0  # between looks at object storage


class WorkBoard:
    """One process' view of the shared work. Use as a context manager.

    Args:
        folder: shared by all processes; made if missing.
        stale_after: seconds without a sign of life after which a process counts as dead.
        poll: seconds between looks while waiting for others.

    Raises:
        LatentStoreError: the folder cannot be written.
    """

    def __init__(self, folder: Place, *, stale_after: float = 30.0, poll: float = 0.5) -> None:
        self.folder = folder
        self._poll = poll
        self._remote = isinstance(folder, RemotePath)  # where each look is a request
        self._owners: dict[str, str] = {}  # there, of claims that were read
        self._seen: tuple[float, set[str]] = (-_SECONDS, set())
        self._mine: dict[str, int] = {}
        self._finished: set[str] = set()
        try:
            self.signs = SignsOfLife(folder, stale_after)
        except OSError as error:
            raise LatentStoreError(f"cannot share work in {folder}: {error.strerror or error}") from error
        self.owner = self.signs.owner
        self._void = set(self._listing()[1])

    def __enter__(self) -> WorkBoard:
        self.signs.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what this process has not finished; the last one to leave clears the folder."""
        self.signs.stop()
        unfinished = [f"{p}.{generation}.claim" for p, generation in self._mine.items() if p not in self._finished]
        for name in [*unfinished, self.signs.alive.name, self.signs.name.name]:
            with suppress(OSError, StorageError):
                (self.folder / name).unlink()
        paths: list[Place] = []
        with suppress(OSError, StorageError):  # another one that leaves at this instant may have cleared it away
            paths = [path for path in self.folder.iterdir() if _OURS.fullmatch(path.name)]
        if not self.signs.living():  # asked after the listing, so that nothing of one that comes now is in it
            for path in paths:
                with suppress(OSError, StorageError):
                    path.unlink()
        self.signs.vanish()

    def claim_each(self, ids: Sequence[str]) -> Iterator[str]:
        """Yield those of `ids` that nobody has claimed, claiming each just before it is yielded."""
        living = self.signs.living()
        claims, done = self._listing()
        void, finished = self._void.intersection(done), set(done) - self._void
        latest = _latest(claims)
        left = {  # by runs that ended or died before this one began
            piece: generation
            for piece, (generation, owner) in latest.items()
            if (claim := f"{piece}.{generation}") in void or (owner and owner not in living and claim not in finished)
        }
        for piece in ids:
            # an earlier claim than one that holds may have been cleared away, and could be made again
            if (piece in left or piece not in latest) and self._claim(piece, left.get(piece, -1)):
                yield piece

    def finish(self, piece: str) -> None:
        """Say that a claimed piece is done and safe on disk."""
        self._finished.add(piece)
        done = self.folder / f"{piece}.{self._mine[piece]}.done"
        with suppress(OSError):
            if isinstance(done, RemotePath):
                done.put("")
            else:
                done.touch()

    def take_over(self, ids: Sequence[str]) -> list[str]:
        """Wait until all `ids` are done, or return pieces of dead processes that are now this one's to do."""
        while True:
            living = self.signs.living()  # before the listing: who ends in between has said what it finished
            claims, done = self._listing()
            finished = self._finished_among(done)
            rest = [piece for piece in ids if piece not in finished]
            if not rest:
                return []
            latest = _latest(claims)
            held = {p for p, (_, owner) in latest.items() if owner in living or owner in ("", self.owner)}
            taken = [p for p in rest if p not in held and self._claim(p, latest.get(p, (-1, ""))[0])]
            if taken:
                return taken
            if not any(p in held for p in rest):
                return []
            time.sleep(_SECONDS if self._remote else self._poll)

    def finished_pieces(self) -> set[str]:
        """Pieces that are done, by whomever, since this process began."""
        if not self._remote:
            return self._finished_among(self._listing()[1])
        if time.monotonic() - self._seen[0] > _SECONDS:
            done = [path.stem for path in self.folder.iterdir() if path.name.endswith(".done")]
            self._seen = time.monotonic(), self._finished_among(done)
        return self._seen[1] | self._finished

    def _finished_among(self, done: list[str]) -> set[str]:
        return {name.rsplit(".", 1)[0] for name in done if name not in self._void} | self._finished

    def _claim(self, piece: str, after: int) -> bool:
        path = self.folder / f"{piece}.{after + 1}.claim"
        try:
            self._sign(path)
        except FileExistsError:
            return False
        except FileNotFoundError:  # this process slept so long that the last of the others cleared its files away
            self.signs.appear()
            return self._claim(piece, after)
        except OSError as error:
            raise LatentStoreError(f"cannot share work in {self.folder}: {error.strerror or error}") from error
        self._mine[piece] = after + 1
        return True

    def _sign(self, path: Place) -> None:
        """Create `path` with this process' name in it; `FileExistsError` if it is another's."""
        if isinstance(path, RemotePath):
            create(path.url, self.owner.encode("utf-8"))
            return
        try:
            os.link(self.signs.name, path)
        except FileExistsError:
            # a network file system may have lost its own answer and asked again
            if path.read_text(encoding="utf-8") != self.owner:
                raise
        except FileNotFoundError:
            raise
        except OSError:  # a file system without links, or with as many as it allows
            with open(path, "x", encoding="utf-8") as file:
                file.write(self.owner)

    def _listing(self) -> tuple[dict[str, str], list[str]]:
        """Claims ("piece.generation" -> owner, "" while it is being written) and finished ones."""
        claims, done = {}, []
        with suppress(FileNotFoundError):
            for name in sizes_in(self.folder, "") if self._remote else os.listdir(self.folder):
                stem, _, kind = name.rpartition(".")
                if not _OURS.fullmatch(name):
                    continue
                if kind == "done":
                    done.append(stem)
                elif kind == "claim":
                    with suppress(OSError):
                        claims[stem] = self._owners.get(stem) or self._owner_of(name)
                        if self._remote:
                            self._owners[stem] = claims[stem]
        return claims, done

    def _owner_of(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8") or self._unsigned(name)

    def _unsigned(self, name: str) -> str:
        """Owner of a claim without a name: "" while it may still be signed, else nobody that lives."""
        return "" if self.signs.is_fresh(self.folder / name) else "nobody"


def _latest(claims: dict[str, str]) -> dict[str, tuple[int, str]]:
    latest: dict[str, tuple[int, str]] = {}
    for name, owner in claims.items():
        piece, _, generation = name.rpartition(".")
        if int(generation) >= latest.get(piece, (-1, ""))[0]:
            latest[piece] = (int(generation), owner)
    return latest
