"""Files of a folder changed so that each change can be undone: what they were lies beside the folder, with a log.

Every run has a folder of its own, `set-aside-of-NAME/N`. A line of its log is on disk before its file is touched, and a
file is always there whole under its old name or its new one, so a run that is killed anywhere can be undone.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kohya_bucket.errors import KohyaBucketError, why_not_written
from kohya_bucket.files import MADE_BY, replacing, write_file
from kohya_bucket.images.formats import explain_os_error
from kohya_bucket.images.mending import Fix, beside, content_of
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.stamps import hash_bytes, hash_file
from kohya_bucket.inputs import MAX_TABLE_BYTES, read_input

_LOG = "log.jsonl"
_HEAD = f"{MADE_BY}: fix"


@dataclass(frozen=True)
class Step:
    """One change, as a line of the log has it. Paths are relative to the folder, with slashes.

    Attributes:
        path: what was there.
        becomes: what is there now; "" where it was set aside.
        made: hash of the file that was written; "" where none was, and the file itself lies under `becomes` or aside.
    """

    path: str
    becomes: str
    made: str


@dataclass
class Outcome:
    """What a run did: the changes, and (path, reason) of what could not be changed."""

    run: Path
    done: int
    failed: list[tuple[str, str]]


def apply(folder: str, fixes: Sequence[Fix], encoding: str, progress: Progress | None = None) -> Outcome:
    """Make the changes, one after the other.

    Raises:
        KohyaBucketError: there is no room or right for the folder of the run.
    """
    root, aside = Path(os.path.abspath(folder)), beside(folder)
    try:
        run = aside / str(max((int(one.name) for one in _runs(aside)), default=0) + 1)
        run.mkdir(parents=True)
        log = open(run / _LOG, "x", encoding="utf-8", newline="\n")  # noqa: SIM115
    except OSError as error:
        raise KohyaBucketError(f"{aside}: cannot be written: {why_not_written(error)}") from None
    outcome = Outcome(run, 0, [])
    with log:
        if not _written(log, {"made_by": _HEAD, "folder": str(root)}):
            raise KohyaBucketError(f"{run / _LOG}: cannot be written: nothing was changed")
        for number, fix in enumerate(fixes):
            if progress is not None:
                progress(number, len(fixes))
            try:
                content = content_of(fix, encoding)
                for path in (fix.path, *fix.along):
                    becomes = fix.becomes if path == fix.path else ""
                    made = "" if content is None else hash_bytes(content)
                    step = Step(_inside(path, root), _inside(becomes, root), made)
                    if not _written(log, asdict(step)):  # without a line nothing is changed, nor after a part of one
                        outcome.failed.append((fix.path, f"there is no room for a line of {run / _LOG}"))
                        return outcome
                    _do(step, root, run, content)
                outcome.done += 1
            except KohyaBucketError as error:
                outcome.failed.append((fix.path, str(error)))
            except OSError as error:
                outcome.failed.append((fix.path, why_not_written(error)))
    return outcome


def _inside(path: str, root: Path) -> str:
    return Path(os.path.relpath(os.path.abspath(path), root)).as_posix() if path else ""


def _written(log: Any, line: dict[str, Any]) -> bool:
    try:
        log.write(json.dumps(line) + "\n")
        log.flush()
        os.fsync(log.fileno())
    except OSError:
        return False
    return True


def _do(step: Step, root: Path, run: Path, content: bytes | None) -> None:
    path, kept = root / step.path, run / step.path
    if content is None:
        target = root / step.becomes if step.becomes else kept
        target.parent.mkdir(parents=True, exist_ok=True)
        _move(path, target)
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    if step.becomes == step.path:
        with replacing(kept) as temporary:
            shutil.copy2(path, temporary)
        write_file(path, [content])
        return
    _refuse_taken(root / step.becomes)  # somebody may have made it since the folder was looked at
    write_file(root / step.becomes, [content])
    _move(path, kept)


def _move(path: Path, target: Path) -> None:
    """Rename a file; what is there already under the new name stays."""
    if not (target.exists() and target.samefile(path)):
        _refuse_taken(target)
    path.rename(target)


def _refuse_taken(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, f"{target} is there already")


def _runs(aside: Path) -> list[Path]:
    """The folders of runs, oldest first."""
    found = [one for one in aside.iterdir() if one.name.isdecimal() and one.is_dir()] if aside.is_dir() else []
    return sorted(found, key=lambda one: int(one.name))


def undo(folder: str) -> Outcome:
    """Undo the last run that was not undone: the last change first. A file that was changed since stays, and is named.

    Raises:
        KohyaBucketError: there is no such run, or its log is not one of ours.
    """
    root, aside = Path(os.path.abspath(folder)), beside(folder)
    run = next((one for one in reversed(_runs(aside)) if (one / _LOG).is_file()), None)
    if run is None:
        raise KohyaBucketError(f"{aside} holds no run to undo: nothing was applied to {folder}, or all of it is undone")
    outcome = Outcome(run, 0, [])
    for step in reversed(list(_steps(run / _LOG))):
        try:
            outcome.done += _undo(step, root, run)
        except OSError as error:
            outcome.failed.append((step.path, explain_os_error(error)))
        except KohyaBucketError as error:
            outcome.failed.append((step.path, str(error)))
    if not outcome.failed:
        (run / _LOG).rename(run / "undone.jsonl")
        for here, folders, names in os.walk(run, topdown=False):
            with suppress(OSError):
                Path(here).rmdir() if not (folders or names) else None
    return outcome


def _steps(log: Path) -> Iterator[Step]:
    lines = read_input(log, MAX_TABLE_BYTES).decode("utf-8").splitlines()
    try:
        if json.loads(lines[0])["made_by"] != _HEAD:
            raise KeyError
        for number, line in enumerate(lines[1:], 2):
            try:
                yield Step(**json.loads(line))
            except ValueError:
                if number < len(lines):  # the last may be cut off by a crash, and then nothing was done for it
                    raise
    except (IndexError, KeyError, TypeError, ValueError):
        raise KohyaBucketError(f"{log} is not a log of this command: nothing was undone") from None


def _undo(step: Step, root: Path, run: Path) -> bool:
    """Whether there was anything to undo."""
    path, kept, now = root / step.path, run / step.path, root / step.becomes if step.becomes else run / step.path
    if not step.made:
        if not now.is_file():
            return False
        _move(now, path)
        return True
    if not kept.is_file():
        if now != path and now.is_file() and hash_file(os.fspath(now)) == step.made:
            now.unlink()  # written, and then the run was stopped
        return False
    if now.exists() and hash_file(os.fspath(now)) != step.made:
        if now == path and hash_file(os.fspath(path)) == hash_file(os.fspath(kept)):
            kept.unlink()  # copied, and then the run was stopped
            return False
        raise KohyaBucketError(f"{now} was changed since: what it was is in {kept}")
    if now == path:
        os.replace(kept, path)
        return True
    _move(kept, path)
    now.unlink(missing_ok=True)
    return True
