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
from kohya_bucket.trainers.at_start import SEEN

_TIMEOUT = 120.0
_PATH_FILE, _MODULE = "kohya_bucket.pth", "_kohya_bucket_at_start"
_LINE = f"import {_MODULE}\n"
_TEMPLATE = Path(__file__).with_name("at_start.py")
_HEAD = '"""Written by `kohya-bucket activate`'
_TRIED = f"import sys, kohya_bucket.launch; sys.exit({_MODULE!r} not in sys.modules)"


@dataclass(frozen=True)
class Activation:
    """State of one environment.

    Attributes:
        folder: its site-packages.
        active: both files are there.
        current: they are those that this version writes.
        seen: (door, checkout) of each trainer that was started since.
    """

    folder: Path
    active: bool
    current: bool
    seen: tuple[tuple[str, str], ...]


def site_packages() -> Path:
    """Where this Python has its packages."""
    return Path(sysconfig.get_path("purelib"))


def activation(folder: Path) -> Activation:
    """What is there."""
    texts = [_text(folder / name) for name in (_PATH_FILE, f"{_MODULE}.py")]
    lines = sorted({line for line in _text(folder / SEEN).splitlines() if "\t" in line})
    seen = tuple((line.partition("\t")[0], line.partition("\t")[2]) for line in lines)
    return Activation(folder, all(texts), texts == [_LINE, _text(_TEMPLATE)], seen)


def activate(folder: Path) -> None:
    """Write both files, and try them in a Python of their own.

    Raises:
        KohyaBucketError: a file of that name is not ours, or a new process of this Python does not find this package.
    """
    _check_ours(folder)
    replace_file(folder / f"{_MODULE}.py", _text(_TEMPLATE).encode())
    py_compile.compile(str(folder / f"{_MODULE}.py"), quiet=1)  # or each start would, where none may write there
    replace_file(folder / _PATH_FILE, _LINE.encode())
    command = [sys.executable, "-c", _TRIED]
    tried = subprocess.run(command, cwd=gettempdir(), capture_output=True, timeout=_TIMEOUT, check=False)
    if tried.returncode:
        deactivate(folder)
        raise KohyaBucketError(
            f"{sys.executable} does not find kohya_bucket by itself, or does not read {folder / _PATH_FILE}: install "
            f"the package into the environment that trains, with `{sys.executable} -m pip install`, and activate it "
            "there"
        )


def deactivate(folder: Path) -> None:
    """Take away what `activate` and the trainings since have written.

    Raises:
        KohyaBucketError: a file of that name is not ours.
    """
    _check_ours(folder)
    for name in (_PATH_FILE, f"{_MODULE}.py", SEEN):
        (folder / name).unlink(missing_ok=True)
    for compiled in (folder / "__pycache__").glob(f"{_MODULE}.*.pyc"):
        compiled.unlink()
    with suppress(OSError):  # of others too
        (folder / "__pycache__").rmdir()


def _check_ours(folder: Path) -> None:
    for name, start in ((_PATH_FILE, f"import {_MODULE}"), (f"{_MODULE}.py", _HEAD)):
        text = _text(folder / name)
        if text and not text.startswith(start):
            raise KohyaBucketError(f"{folder / name} was not written by kohya_bucket: move it away first")


def _text(file: Path) -> str:
    if not file.is_file():
        return ""
    return read_input(file, MAX_CONFIG_BYTES).decode("utf-8", "replace").replace("\r\n", "\n")
