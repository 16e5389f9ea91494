"""The door that one Python environment has for all trainers: two files of ours in its site-packages.

`kohya_bucket.pth` makes Python import `_kohya_bucket_at_start.py` at each start: a copy of `at_start.py`, since pip
takes the package away and leaves these.
"""

from __future__ import annotations

import py_compile
import subprocess
import sys
import sysconfig
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import gettempdir

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import replace_file
from kohya_bucket.inputs import MAX_CONFIG_BYTES, read_input
from kohya_bucket.trainers.at_start import NAME
from kohya_bucket.trainers.door.registry import trainers

_TIMEOUT = 120.0
_PATH_FILE, _MODULE = "kohya_bucket.pth", f"{NAME}.py"
_LINE = f"import {NAME}\n"
_TEMPLATE = Path(__file__).with_name("at_start.py")
_NONE = 'TRAINERS: "Sequence[tuple[str, str, Sequence[str]]]" = ()\n'
_HEAD = '"""Written by `kohya-bucket activate`'
_TRIED = f"import sys, kohya_bucket.launch; sys.exit({NAME!r} not in sys.modules)"
_STARTS = {_PATH_FILE: f"import {NAME}", _MODULE: _HEAD}
"""How each of our files begins."""


@dataclass(frozen=True)
class Activation:
    """State of one environment.

    Attributes:
        active: both files are there.
        current: they are those that this version writes.
    """

    active: bool
    current: bool


def site_packages() -> Path:
    """Where this Python has its packages."""
    return Path(sysconfig.get_path("purelib"))


def activation(folder: Path) -> Activation:
    """What is there."""
    texts = [_text(folder / name) for name in (_PATH_FILE, _MODULE)]
    return Activation(all(texts), texts == [_LINE, _module()])


def activate(folder: Path) -> None:
    """Write both files, and try them in a Python of their own; where that fails, what was active before stays so.

    Raises:
        KohyaBucketError: a file of that name is not ours, or a new process of this Python does not find this package.
    """
    was_active = activation(folder).active
    write(folder)
    if not _is_found():
        if not was_active:
            deactivate(folder)
        raise KohyaBucketError(
            f"{sys.executable} does not find kohya_bucket by itself, or does not read {folder / _PATH_FILE}: install "
            f"the package into the environment that trains, with `{sys.executable} -m pip install`, and activate it "
            "there"
        )


def write(folder: Path) -> None:
    """Write both files.

    Raises:
        KohyaBucketError: a file of that name is not ours.
    """
    _check_ours(folder)
    replace_file(folder / _MODULE, _module().encode())
    py_compile.compile(str(folder / _MODULE), quiet=1)  # or each start would, where none may write there
    replace_file(folder / _PATH_FILE, _LINE.encode())


def _is_found() -> bool:
    """Whether a new process of this Python, started anywhere, is active and has this package."""
    try:
        command = [sys.executable, "-c", _TRIED]
        tried = subprocess.run(command, cwd=gettempdir(), capture_output=True, timeout=_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return False
    return tried.returncode == 0


def deactivate(folder: Path) -> None:
    """Take away what `activate` has written.

    Raises:
        KohyaBucketError: a file of that name is not ours.
    """
    _check_ours(folder)
    for name in _STARTS:
        (folder / name).unlink(missing_ok=True)
    for compiled in (folder / "__pycache__").glob(f"{NAME}.*.pyc"):
        compiled.unlink()
    with suppress(OSError):  # of others too
        (folder / "__pycache__").rmdir()


def _check_ours(folder: Path) -> None:
    for name, start in _STARTS.items():
        if (folder / name).exists() and not _text(folder / name).startswith(start):
            raise KohyaBucketError(f"{folder / name} was not written by kohya_bucket: move it away first")


def _module() -> str:
    """`at_start.py` with the trainers that are there now."""
    rows = [(one.package, type(one).__module__.split(".")[-2], one.marks) for one in trainers()]
    listed = "".join(f"    {row!r},\n" for row in rows)
    return _text(_TEMPLATE).replace(_NONE, f"{_NONE[:-3]}(\n{listed})\n", 1)


def _text(file: Path) -> str:
    if not file.is_file():
        return ""
    return read_input(file, MAX_CONFIG_BYTES).decode("utf-8", "replace").replace("\r\n", "\n")
