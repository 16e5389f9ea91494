"""Run a trainer with the adapter: `accelerate launch -m kohya_bucket.launch train_network.py …`.

Also `python -m kohya_bucket.launch …` and `torchrun -m kohya_bucket.launch …`, from a checkout or with the
trainer's path, or `-m` and a module's name. All arguments after it are the trainer's own. Which trainer it is, shows
when it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from tempfile import gettempdir
from typing import Any, NoReturn

from kohya_bucket.buckets.choices import listed
from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.texts import one_line
from kohya_bucket.trainers import at_start
from kohya_bucket.trainers.door.ranks import USED, end_run
from kohya_bucket.trainers.door.registry import trainers

_USAGE = "usage: accelerate launch -m kohya_bucket.launch TRAINER.py | -m MODULE [the trainer's arguments]"


def main(argv: list[str] | None = None) -> None:
    """Install the adapter, then run the trainer as if it had been started by itself."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(2 if not arguments else 0)
    if arguments[0] == "-m" and len(arguments) > 1:
        if not (top := arguments[1].partition(".")[0]) or importlib.util.find_spec(top) is None:
            _refuse(f"module {arguments[1]!r} for this Python", "install the trainer", _USAGE)
        _run(lambda: runpy.run_module(arguments[1], run_name="__main__", alter_sys=True), arguments[1:])
    else:
        run_trainer(arguments[0], arguments[1:], _USAGE)


def run_trainer(script: str, arguments: Sequence[str], usage: str) -> None:
    """Install the adapter, then run a trainer as if it had been started by itself, with these arguments."""
    if not os.path.isfile(script):  # noqa: PTH113
        _refuse(f"trainer {script!r} in {os.getcwd()}", "give the trainer's path", usage)  # noqa: PTH109
    folder = os.path.dirname(os.path.abspath(script))  # noqa: PTH100, PTH120
    # As Python does for a script: in front, for another checkout that is on the path has modules of the same names.
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    _run(lambda: runpy.run_path(script, run_name="__main__"), [script, *arguments])


def _refuse(missing: str, remedy: str, usage: str) -> NoReturn:
    what_to_do = f"start from the trainer's checkout, or {remedy}"
    print(f"kohya_bucket: there is no {missing}: {what_to_do}\n{usage}", file=sys.stderr)
    raise SystemExit(2)


def _run(trainer: Callable[[], object], arguments: list[str]) -> None:
    sys.argv, name = list(arguments), Path(arguments[0]).name
    ended: SystemExit | None = None
    doors = [one.door() for one in trainers()]
    with _noted_uses() as folder:
        started = _watch_started(name, folder)
        try:
            for door in doors:
                door.open(at_once=True)
            trainer()
        except KohyaBucketError as error:
            print(f"kohya_bucket: {one_line(_message(error))}", file=sys.stderr)
            raise SystemExit(2) from error
        except SystemExit as end:
            ended = end
        except KeyboardInterrupt as interrupt:
            if not interrupt.args:  # else it says what is kept
                raise
            print(f"kohya_bucket: {one_line(interrupt)}", file=sys.stderr)
            raise SystemExit(130) from None
        used = any(door.is_active() for door in doors) or (folder.is_dir() and any(folder.iterdir()))
    whose = listed([one.name for one in trainers()], "or")
    if not used and (started or any(module in sys.modules for module in _SPAWNED)):
        line = (
            f"{name} made no datasets of {whose}, and none of the processes that it started "
            f"({one_line(', '.join(started))[:200] or 'by multiprocessing'}) did so with kohya_bucket: if one of them "
            f"trained, it trained without. {_REMEDY}"
        )
        if ended is None or not ended.code:
            end_run(line)
        if _watching:  # else a trainer was stopped, and named
            print(f"kohya_bucket: {line}", file=sys.stderr)
    elif not used and ended is None and is_first_process():
        print(f"kohya_bucket: {name} uses no datasets of {whose}, so there was nothing to do", file=sys.stderr)
    if ended is not None:
        raise ended


@contextmanager
def _noted_uses() -> Iterator[Path]:
    """Where processes below this one note that they use the adapter: made for the first, and removed at the end.

    Below another launcher it is that one's, which looks into it later.
    """
    if USED in os.environ:
        yield Path(os.environ[USED])
        return
    folder = Path(gettempdir(), f"kohya-bucket-{token_hex(8)}")
    os.environ[USED] = str(folder)
    try:
        yield folder
    finally:
        del os.environ[USED]
        shutil.rmtree(folder, ignore_errors=True)


# Processes that a script behind the launcher starts: they begin without the adapter.

_REMEDY = "Start the trainer itself with `-m kohya_bucket.launch`, or activate this Python with `kohya-bucket activate`"
_STARTS = {"subprocess.Popen": 1, "os.system": 0, "os.exec": 1, "os.posix_spawn": 1, "os.spawn": 2}
"""Events of Python, and which of their arguments is the command."""
_SPAWNED = tuple(f"multiprocessing.popen_{kind}" for kind in ("spawn_posix", "spawn_win32", "forkserver"))
"""Modules that are imported when multiprocessing starts a process that is not a copy of this one."""
_PYTHON = re.compile(r"(python[\d.]*w?|accelerate(-launch)?|torchrun|deepspeed)(\.exe)?", re.IGNORECASE)
_WITH_ADAPTER = re.compile(r"(-m)?kohya_bucket\.(launch|precompute)|(.*[/\\])?kohya_bucket[/\\](launch|precompute)\.py")
_PROGRAM = re.compile(r"\.py$|train|fine_tune|musubi", re.IGNORECASE)

_watching: list[Callable[[str, tuple[Any, ...]], None]] = []


def _watch_started(script: str, folder: Path) -> list[str]:
    """Programs that may train, as they are started from now on; a trainer without the adapter ends the run first."""
    started: list[str] = []

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        words = list(_words(arguments[_STARTS[event]]))
        programs = [word for word in words if _PROGRAM.search(word) and "-packages" not in word]
        if not programs or not any(_PYTHON.fullmatch(os.path.basename(word)) for word in words):  # noqa: PTH119
            return
        started.append(programs[0])
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
        cwd = arguments[2] if event == "subprocess.Popen" and arguments[2] else "."
        if any(_WITH_ADAPTER.fullmatch(word) for word in words):
            return
        for program in programs:
            if _trains_without(Path(os.fsdecode(cwd), program)):
                _watching.clear()
                end_run(f"{script} starts {program} in a process of its own, where it would train without "
                        f"kohya_bucket. {_REMEDY}")  # fmt: skip

    if not _watching:  # a hook stays for good: it asks who watches now, if anybody does
        sys.addaudithook(lambda event, arguments: _watching[-1](event, arguments) if event in _STARTS and _watching
                         else None)  # fmt: skip
    _watching[:] = [look]
    return started


def _words(command: Any) -> Iterator[str]:
    for part in [command] if isinstance(command, (str, bytes, os.PathLike)) else command or ():
        text = os.fsdecode(part)
        yield text
        if " " in text:
            with suppress(ValueError):
                windows = os.name == "nt"  # where a command is one text, and its backslashes are those of paths
                yield from (word.strip('"') if windows else word for word in shlex.split(text, posix=not windows))


def _trains_without(program: Path) -> bool:
    """Whether this is a trainer of a checkout that does not bring the adapter by itself, and this Python neither."""
    if getattr(sys.modules.get(at_start.NAME), "ACTIVE", False):
        return False
    return program.is_file() and any(trainer.starts_with(program) for trainer in trainers())


def _message(error: KohyaBucketError) -> str:
    """What an error says. torch puts a traceback before what a loader's worker had to say."""
    kind = type(error)
    return str(error).rpartition(f"{kind.__module__}.{kind.__qualname__}: ")[2].rstrip()


if __name__ == "__main__":
    main()
