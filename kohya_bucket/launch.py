"""Run a trainer with the adapter: `accelerate launch -m kohya_bucket.launch train_network.py …`.

Also `python -m kohya_bucket.launch …` and `torchrun -m kohya_bucket.launch …`, from a checkout or with the
trainer's path, or `-m` and a module's name. All arguments after it are the trainer's own. Trainers are those of
sd-scripts and musubi-tuner; which one it is, shows when it is imported.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kohya_bucket import musubi, sdscripts
from kohya_bucket.adapter.ranks import is_first_process
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.texts import one_line

DOORS = (sdscripts, musubi)
"""Of all trainers."""

_USAGE = "usage: accelerate launch -m kohya_bucket.launch TRAINER.py | -m MODULE [the trainer's arguments]"


def main(argv: list[str] | None = None) -> None:
    """Install the adapter, then run the trainer as if it had been started by itself."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stderr)
        raise SystemExit(2 if not arguments else 0)
    if arguments[0] == "-m" and len(arguments) > 1:
        _run(lambda: runpy.run_module(arguments[1], run_name="__main__", alter_sys=True), arguments[1:])
    else:
        run_trainer(arguments[0], arguments[1:], _USAGE)


def run_trainer(script: str, arguments: Sequence[str], usage: str) -> None:
    """Install the adapter, then run a trainer as if it had been started by itself, with these arguments."""
    if not os.path.isfile(script):  # noqa: PTH113
        print(
            f"kohya_bucket: there is no trainer {script!r} in {os.getcwd()}: "  # noqa: PTH109
            f"start from the trainer's checkout, or give the trainer's path\n{usage}",
            file=sys.stderr,
        )
        raise SystemExit(2)
    folder = os.path.dirname(os.path.abspath(script))  # noqa: PTH100, PTH120
    # As Python does for a script: in front, for another checkout that is on the path has modules of the same names.
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    _run(lambda: runpy.run_path(script, run_name="__main__"), [script, *arguments])


def _run(trainer: Callable[[], object], arguments: list[str]) -> None:
    sys.argv = list(arguments)
    try:
        for door in DOORS:
            door.install(at_once=True)
        trainer()
    except KohyaBucketError as error:
        print(f"kohya_bucket: {one_line(_message(error))}", file=sys.stderr)
        raise SystemExit(2) from error
    if not any(door.is_active() for door in DOORS) and is_first_process():
        print(
            f"kohya_bucket: {Path(arguments[0]).name} uses no data sets of sd-scripts or musubi-tuner, so there was "
            "nothing to do",
            file=sys.stderr,
        )


def _message(error: KohyaBucketError) -> str:
    """What an error says. torch puts a traceback before what a loader's worker had to say."""
    kind = type(error)
    return str(error).rpartition(f"{kind.__module__}.{kind.__qualname__}: ")[2].rstrip()


if __name__ == "__main__":
    main()
