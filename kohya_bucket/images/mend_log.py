"""Changes to the files of a folder that can be undone: the old files stay in the folder, with a log.

Each run has its own folder `.set-aside/N`, on the same disk, with a name and endings that no trainer lists. A change
moves the old file there, to a free name, and then puts the new one into the folder, where its name must be free too.
Neither step can overwrite a file, and a file that is not the one that was examined goes back. The log line is on disk
before. So after a kill at any point the files themselves show how far a run came.

A log may come from a stranger: only files below the folder count, and never through a link.
"""

from __future__ import annotations

import json
import os
import platform
import random
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from secrets import token_hex
from typing import Any

from kohya_bucket.errors import KohyaBucketError, why_not_written
from kohya_bucket.files import MADE_BY
from kohya_bucket.images.mending import Fix, content_of, stamp_of_plain
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.stamps import hash_bytes, hash_file
from kohya_bucket.inputs import MAX_TABLE_BYTES, read_input
from kohya_bucket.texts import counted, parse_json

_PLACE, _LOG, _CLAIM = ".set-aside", "log.jsonl", "claim-"
_HEAD = f"{MADE_BY}: fix"
_CHANGED = "has changed since it was examined: run again"
_SHOWN = 60  # characters of a name that a file that is set aside keeps


@dataclass(frozen=True)
class Step:
    """One change, as a line of the log has it. Paths are relative to the folder, with slashes.

    Attributes:
        path: of the old file.
        becomes: of the new file; "" if the old one is only set aside.
        made, moved: hash of the file at `becomes`: a new one, or the old one itself.
    """

    path: str
    becomes: str = ""
    made: str = ""
    moved: str = ""


@dataclass
class Outcome:
    """The result of a run: how many files were changed or put back, and (path, reason) of those that could not be."""

    run: Path
    done: int
    failed: list[tuple[str, str]]


class _Files:
    """The paths of one step.

    Attributes:
        path, becomes: of the old and the fixed file, in the folder.
        kept: of the old file, in the folder of the run.
        new: there, of a fixed file that is being written.
        gone: there, of a fixed file that is being undone.
    """

    def __init__(self, root: Path, run: Path, number: int, step: Step) -> None:
        self.path, self.becomes = _inside(root, step.path), _inside(root, step.becomes) if step.becomes else None
        self.kept = run / f"{number}-{self.path.name[-_SHOWN:]}.aside"
        self.new, self.gone = run / f"{number}.new.aside", run / f"{number}.gone.aside"


def _inside(root: Path, text: str) -> Path:
    """The path of a file in the folder.

    Raises:
        KohyaBucketError: the name is not that of a file below the folder, or leads through a link.
    """
    parts = text.split("/")
    try:
        is_name = "\0" not in text and bool(os.fsencode(text))
    except UnicodeError:
        is_name = False
    if not is_name or PurePath(text).parts != tuple(parts) or ".." in parts or parts[0].casefold() == _PLACE:
        raise KohyaBucketError(f"{text!r} is not the path of a file in {root}")
    path = root / text
    if os.path.normcase(os.path.realpath(path.parent)) != os.path.normcase(path.parent):
        raise KohyaBucketError(f"{path.parent} is a link, or behind one")
    return path


def apply(folder: str, fixes: Sequence[Fix], encoding: str, progress: Progress | None = None) -> Outcome:
    """Make the changes one after the other. A file that has changed since it was examined stays, and is named.

    Raises:
        KohyaBucketError: there is no room or right for the folder of the run, or another run is at work.
        KeyboardInterrupt: Ctrl-C; its text says how many were done.
    """
    root = Path(os.path.realpath(folder))
    place = root / _PLACE
    try:
        with _locked(place):
            run = place / str(max((int(path.name) for path in _runs(place)), default=0) + 1)
            run.mkdir()
            _give_to_owner(run, root.stat())
            outcome, is_interrupted = Outcome(run, 0, []), False
            with open(run / _LOG, "x", encoding="utf-8", newline="\n") as log:
                _write_line(log, {"made_by": _HEAD})
                try:
                    _apply_all(folder, root, fixes, encoding, outcome, log, progress)
                except KeyboardInterrupt:
                    is_interrupted = True
            if not outcome.done:
                _undo_run(root, run, [])
            if is_interrupted:
                undo = f"; what they were is in {run}, and --undo puts it back" if outcome.done else ""
                raise KeyboardInterrupt(f"interrupted after {outcome.done} of {counted(len(fixes), 'file')}{undo}")
            return outcome
    except OSError as error:
        raise KohyaBucketError(f"{place}: cannot be written: {why_not_written(error)}") from None


def _apply_all(
    folder: str, root: Path, fixes: Sequence[Fix], encoding: str, outcome: Outcome, log: Any,
    progress: Progress | None,
) -> None:  # fmt: skip
    stayed, lines = set[str](), 0
    for number, fix in enumerate(fixes):
        if progress is not None:
            progress(number, len(fixes))
        try:
            if fix.beside in stayed:
                raise KohyaBucketError("its image stays")
            content = content_of(fix, encoding)
            step = _step_of(fix, content, folder)
            files = _Files(root, outcome.run, lines + 1, step)
            if stamp_of_plain(files.path) != fix.stamp:
                raise KohyaBucketError(_CHANGED)
            try:
                _write_line(log, asdict(step))
            except OSError as error:  # without a line nothing is changed, nor after a part of one
                why = f"{outcome.run / _LOG}: cannot be written: {why_not_written(error)}"
                outcome.failed += [(other.path, why) for other in fixes[number:]]
                return
            lines += 1
            _change(files, fix, content)
            outcome.done += 1
        except (KohyaBucketError, OSError) as error:
            outcome.failed.append((fix.path, _why(error)))
            stayed.add(fix.path)


def _why(error: KohyaBucketError | OSError) -> str:
    return str(error) if isinstance(error, KohyaBucketError) else why_not_written(error)


def _step_of(fix: Fix, content: bytes | None, folder: str) -> Step:
    path, becomes = (PurePath(os.path.relpath(name, folder)).as_posix() for name in (fix.path, fix.becomes or folder))
    if not fix.becomes:
        return Step(path)
    if content is None:
        return Step(path, becomes, moved=hash_file(fix.path))
    return Step(path, becomes, made=hash_bytes(content))


def _write_line(log: Any, line: dict[str, Any]) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()
    os.fsync(log.fileno())


def _change(files: _Files, fix: Fix, content: bytes | None) -> None:
    """Put the file aside and the fixed one in its place; after a fault the file is back under its name."""
    try:
        if content is not None:
            with open(files.new, "xb") as out:
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
            _give_to_owner(files.new, files.path.stat(), mode=True)
        # Only now is it certain which file was there: one that changed at the last moment goes back.
        files.path.rename(files.kept)
        try:
            if stamp_of_plain(files.kept) != fix.stamp:
                raise KohyaBucketError(_CHANGED)
            if files.becomes is not None:
                _put(files.kept if content is None else files.new, files.becomes)
        except (OSError, KohyaBucketError):
            _put(files.kept, files.path)
            raise
    finally:
        with suppress(OSError):
            files.new.unlink(missing_ok=True)


def _put(source: Path, target: Path) -> None:
    """Rename a file of ours; `KohyaBucketError` if the name is taken, without replacing anything."""
    try:
        if os.name == "nt":  # never renames over a file
            source.rename(target)
            return
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(target):
                raise FileExistsError from None
            source.rename(target)
        else:
            with suppress(OSError):
                source.unlink()
    except FileExistsError:
        raise KohyaBucketError(f"{target} is there already; what is to be put there is in {source}") from None


def undo(folder: str) -> Outcome:
    """Undo the last run that was not undone, or if nothing of it can be undone, the one before. Files that cannot be
    put back are named.

    Raises:
        KohyaBucketError: there is no such run, or another run is at work.
    """
    root = Path(os.path.realpath(folder))
    place, outcome = root / _PLACE, Outcome(root, 0, [])
    try:
        if os.path.lexists(place):
            with _locked(place):
                for run in reversed(_runs(place)):
                    outcome.run, outcome.done = run, _undo_run(root, run, outcome.failed)
                    if outcome.done:
                        break
    except OSError as error:
        raise KohyaBucketError(f"{place}: cannot be written: {why_not_written(error)}") from None
    if not outcome.done and not outcome.failed:
        raise KohyaBucketError(f"{place} holds no run to undo: nothing was applied to {folder}, or all of it is undone")
    outcome.failed = [(os.path.join(folder, path), why) for path, why in outcome.failed]
    return outcome


def _undo_run(root: Path, run: Path, failed: list[tuple[str, str]]) -> int:
    """Put back the files of a run, and remove its folder if it is empty then; returns how many were put back."""
    log, done, failed_before = run / _LOG, 0, len(failed)
    try:
        for number, line in reversed(_lines(log)):
            name = f"line {number + 1} of {log}"
            try:
                step = _step_in(line)
                name = step.path
                done += _undo(_Files(root, run, number, step), step)
            except (KohyaBucketError, OSError) as error:
                failed.append((name, _why(error)))
    except KohyaBucketError as error:
        failed.append((os.fspath(log), str(error)))
    if len(failed) == failed_before:
        log.unlink(missing_ok=True)
        with suppress(OSError):
            run.rmdir()
    return done


def _lines(log: Path) -> list[tuple[int, bytes]]:
    """The log's lines by number; none if the run was stopped before its first step."""
    if not os.path.lexists(log):
        return []
    if not stat.S_ISREG(log.lstat().st_mode):
        raise KohyaBucketError("is not a regular file")
    head, *lines = read_input(log, MAX_TABLE_BYTES).split(b"\n")
    if not lines:  # a crash cut it off, before anything was changed
        return []
    with _as_line():
        if parse_json(head.decode("utf-8")) != {"made_by": _HEAD}:
            raise ValueError
    return list(enumerate(lines[:-1], 1))  # behind the last line feed is what a crash cut off


@contextmanager
def _as_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError):
        raise KohyaBucketError("is damaged, or not of this command: nothing was done for it") from None


def _step_in(line: bytes) -> Step:
    with _as_line():
        step = Step(**parse_json(line.decode("utf-8")))
        if not all(isinstance(value, str) for value in asdict(step).values()):
            raise TypeError
        return step


def _undo(files: _Files, step: Step) -> bool:
    """Undo one step; returns whether there was anything to undo."""
    _settle(files, step)
    # Before the last line the old file must be in `kept`, and nothing of ours at `becomes`.
    fixed = files.becomes
    if not _is_plain(files.kept):
        if fixed is None or not _is_there(fixed) or not _is_made(fixed, step):  # not changed yet, or undone already
            if _is_there(files.path):
                return False
            if step.moved and fixed is not None and _is_there(fixed):
                raise KohyaBucketError(f"{fixed} was changed since: it keeps its new name")
            raise KohyaBucketError("is not there, nor what was kept of it")
        if not step.moved:  # a file that was written, of which there is nothing else
            raise KohyaBucketError(f"what was kept of it, {files.kept}, is gone")
        if _is_there(files.path):
            raise KohyaBucketError(f"{files.path} is there already; what is to be put there is in {fixed}")
        fixed.rename(files.kept)
    elif _is_plain(files.path) and files.path.samefile(files.kept):  # an undo was stopped between link and unlink
        files.kept.unlink()
        return True
    elif fixed is not None and os.path.lexists(fixed):
        if not _is_ours(fixed, files, step):
            raise KohyaBucketError(f"{fixed} was changed since: what it was is in {files.kept}")
        if os.path.lexists(files.path) and not files.path.samefile(fixed):
            raise KohyaBucketError(f"{files.path} is there already; what is to be put there is in {files.kept}")
        fixed.rename(files.gone)  # where nobody changes it any more; `_settle` checks it again and removes it
        _settle(files, step)
    _put(files.kept, files.path)
    return True


def _is_ours(path: Path, files: _Files, step: Step) -> bool:
    return _is_plain(path) and (path.samefile(files.kept) or _is_made(path, step))


def _is_made(path: Path, step: Step) -> bool:
    """Whether a file has the content that the step put there."""
    return _is_plain(path) and hash_file(os.fspath(path)) == (step.made or step.moved)


def _settle(files: _Files, step: Step) -> None:
    """Remove what a step wrote and no longer needs; a fixed file goes back that was changed at the last moment, or
    whose old name somebody took."""
    files.new.unlink(missing_ok=True)
    if files.becomes is not None and os.path.lexists(files.gone):
        is_ours = _is_ours(files.gone, files, step)
        if not is_ours or os.path.lexists(files.path):
            _put(files.gone, files.becomes)
            what = f"{files.path} is there already" if is_ours else f"{files.becomes} was changed since"
            raise KohyaBucketError(f"{what}: what it was is in {files.kept}")
        files.gone.unlink()


def _is_there(path: Path) -> bool:
    """Whether a path exists in exactly this case, even if the file system ignores case."""
    if not os.path.lexists(path):
        return False
    # Listing a folder for each of its files takes hours: only where it has this name in another case too.
    other_case = "".join(letter.swapcase() if letter.isascii() else letter for letter in path.name)
    any_case = other_case == path.name or os.path.lexists(path.with_name(other_case))
    return not any_case or path.name in os.listdir(path.parent)


def _is_plain(path: Path) -> bool:
    return os.path.lexists(path) and stat.S_ISREG(path.lstat().st_mode)


def _runs(place: Path) -> list[Path]:
    """The folders of runs, oldest first."""
    runs = [path for path in place.iterdir() if path.name.isdecimal() and path.is_dir() and not path.is_symlink()]
    return sorted(runs, key=lambda path: int(path.name))


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Hold the place for one run at a time: a run goes on if it sees no claim beside its own.

    Two that come at one instant see each other and try again.
    """
    if place.is_symlink() or (place.exists() and not place.is_dir()):
        raise KohyaBucketError(f"{place} is not a folder: move it away")
    for tries_left in (2, 1, 0):
        with _claimed(place) as others:
            if not others:
                yield
                return
        if tries_left:
            time.sleep(random.random() / 20)
    raise KohyaBucketError(f"another run is at work in {place}; if none is, delete {others[0]}")


@contextmanager
def _claimed(place: Path) -> Iterator[list[Path]]:
    """Claim the place by a file whose name is unique and says which process it belongs to; yields the others' claims.

    Claims of processes that are gone are removed; a run at work never loses its own.
    """
    claim = place / f"{_CLAIM}{os.getpid()}-{_machine()}-{token_hex(4)}"
    try:
        with suppress(FileExistsError):
            place.mkdir()
            _give_to_owner(place, place.parent.stat())
        try:
            holder = open(claim, "x", encoding="utf-8")  # noqa: SIM115  (a run's own errors are not this one's)
        except FileNotFoundError:  # another run ended just now and took the place away
            yield [claim]
            return
        with holder:  # open as long as this runs: Windows then lets nobody remove it
            yield [other for other in place.glob(f"{_CLAIM}*") if other != claim and not _is_removed(other)]
    finally:
        with suppress(OSError):
            claim.unlink()
        with suppress(OSError):
            place.rmdir()


def _machine() -> str:
    """This machine in the name of a claim: a folder may be shared between several."""
    return hash_bytes(platform.node().encode("utf-8", "surrogatepass"))[:8]


def _is_removed(claim: Path) -> bool:
    """Whether a claim was that of a process of this machine which is gone, and is removed."""
    number, _, rest = claim.name.removeprefix(_CLAIM).partition("-")
    if not number.isdecimal() or not rest.startswith(f"{_machine()}-"):
        return False
    if os.name != "nt":  # there, what is open cannot be removed
        try:
            os.kill(int(number), 0)
            return False
        except (ProcessLookupError, OverflowError):
            pass
        except OSError:
            return False
    try:
        claim.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def _give_to_owner(path: Path, status: os.stat_result, *, mode: bool = False) -> None:
    """Make a file or folder that root makes among another's files that one's."""
    with suppress(OSError):
        if hasattr(os, "chown"):
            os.chown(path, status.st_uid, status.st_gid)
    if mode:
        with suppress(OSError):
            path.chmod(stat.S_IMODE(status.st_mode))
