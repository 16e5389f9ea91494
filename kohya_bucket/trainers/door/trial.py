"""Whether the adapter knows a trainer's checkout: tried by importing both in a process of their own."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.trainers.door.door import TrainerDoor

_MARK = "kohya_bucket probe: "
_PACKAGES = Path(__file__).parents[3]
_TIMEOUT = 300.0


@dataclass
class Trial:
    """What came of it.

    Attributes:
        active: whether the adapter is in place once the trainer is imported.
        refused: why it is not, where this version is not known.
        left_alone: {subject: why} of what is left to the trainer.
        error: what went wrong while importing.
    """

    active: bool = False
    refused: str = ""
    left_alone: dict[str, str] = field(default_factory=dict)
    error: str = ""


def try_adapter(folder: Path, door: str, imports: Sequence[str]) -> Trial:
    """Import a trainer with the adapter, in a process of its own, and write nothing.

    Args:
        folder: the one that the trainer's modules are imported from.
        door: the module of the trainer's `DOOR`.
        imports: modules with which everything is imported that the door looks at.
    """
    # where this package is run from a folder, the new process would not find it
    code = f"import sys; sys.path.append({str(_PACKAGES)!r}); from {__name__} import main; main()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder), door, *imports],
            capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=_TIMEOUT, check=False,
            env=os.environ | {"PYTHONUTF8": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Trial(error=f"it was not done after {_TIMEOUT:.0f} s")
    for line in done.stdout.splitlines():
        if line.startswith(_MARK):
            return Trial(**json.loads(line.removeprefix(_MARK)))
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return Trial(error=last[0] if last else f"exit code {done.returncode}")


def main() -> None:
    """The process of a trial: its arguments are folder, door and imports, its answer is the line with the mark."""
    print(_MARK + json.dumps(asdict(_try_here(sys.argv[1], sys.argv[2], sys.argv[3:]))), flush=True)


def _try_here(folder: str, door: str, imports: Sequence[str]) -> Trial:
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    try:
        opened: TrainerDoor = importlib.import_module(door).DOOR
        opened.open(quiet=True)
        for name in imports:
            importlib.import_module(name)
        return Trial(opened.is_active(), opened.why_inactive(), opened.left_alone())
    except KohyaBucketError as error:
        return Trial(refused=str(error))
    except Exception as error:
        return Trial(error=f"{type(error).__name__}: {error}")
