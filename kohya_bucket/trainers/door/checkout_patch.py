"""The permanent door of one trainer: a marked block in a file that each of its programs imports.

That file is empty in every release, and is imported before any other of the trainer's modules; or it is ours alone, in
a folder for extensions. The block stays through `git pull`, and trainers that a GUI starts find it.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.files import replace_file
from kohya_bucket.inputs import MAX_CONFIG_BYTES, open_input, read_input

BEGIN = "# >>> kohya_bucket >>>"
END = "# <<< kohya_bucket <<<"


class CheckoutError(KohyaBucketError):
    """The folder is not a checkout, or its file cannot be changed."""


@dataclass(frozen=True)
class PatchStatus:
    """State of one file: `installed` is False where there is no block, `current` where it is another version's.

    `stale` is what Python has compiled of another state of the file and runs in its place, unchecked.
    """

    file: Path
    installed: bool
    current: bool
    stale: Path | None = None


def _find_block(file: Path, text: str) -> tuple[int, int] | None:
    begin, end = text.find(BEGIN), text.find(END)
    if begin < 0 and end < 0:
        return None
    if begin < 0 or end < begin:
        raise CheckoutError(f"{file} holds half a kohya_bucket block: remove the lines around {BEGIN!r} by hand")
    stop = end + len(END)
    for line_end in ("\r\n", "\n"):
        if text.startswith(line_end, stop):
            return begin, stop + len(line_end)
    if text[:begin].endswith("\n"):
        begin -= 2 if text[:begin].endswith("\r\n") else 1
    return begin, stop


def _without_blocks(file: Path, text: str) -> str:
    """The file's text without any block; a merge may have doubled it."""
    while (block := _find_block(file, text)) is not None:
        text = text[: block[0]] + text[block[1] :]
    return text


def _read(file: Path) -> str:
    return read_input(file, MAX_CONFIG_BYTES).decode("utf-8", "surrogateescape")


def _write(file: Path, text: str) -> None:
    replace_file(file, text.encode("utf-8", "surrogateescape"))


def _unchecked(file: Path) -> dict[Path, bytes]:
    """What Python has compiled of a file and runs without looking whether it has changed (PEP 552), with the hash of
    the source that each was made of.
    """
    mine = Path(importlib.util.cache_from_source(file))  # elsewhere with PYTHONPYCACHEPREFIX
    found = {}
    for compiled in {*(file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"), *([mine] if mine.is_file() else [])}:
        with suppress(FileNotFoundError), open_input(compiled) as handle:
            head = handle.read(16)
            if head[4:5] == b"\1":
                found[compiled] = head[8:16]
    return found


def _drop_unchecked(file: Path) -> None:
    for compiled in _unchecked(file):
        compiled.unlink()


def _stale(file: Path) -> Path | None:
    if not file.exists():
        return None
    now = importlib.util.source_hash(file.read_bytes())
    return next((compiled for compiled, then in sorted(_unchecked(file).items()) if then != now), None)


def _remove(file: Path) -> None:
    """A file that is ours, what Python has compiled of it, and its folder if nothing else is in it."""
    file.unlink()
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        compiled.unlink()
    for folder in (file.parent / "__pycache__", file.parent):
        with suppress(OSError):
            folder.rmdir()


_MARK = "kohya_bucket probe: "
_PACKAGES = Path(__file__).parents[2]
_TIMEOUT = 300.0


@dataclass
class Trial:
    """What came of it.

    Attributes:
        active: whether the adapter is in place once the trainer is imported.
        runs_block: whether the trainer's package brings the door by itself.
        refused: why it is not, where this version is not known.
        left_alone: {subject: why} of what is left to the trainer.
        missing: module that is not installed in this environment.
        error: what went wrong while importing.
    """

    active: bool = False
    runs_block: bool = False
    refused: str = ""
    left_alone: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    error: str = ""


def main() -> None:
    """The process of a trial: its arguments are folder, door, the module of the block and others, its answer is the
    line with the mark.
    """
    print(_MARK + json.dumps(asdict(_try_here(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))), flush=True)


def _try_here(folder: str, door: str, block: str, imports: Sequence[str]) -> Trial:
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    runs_block = False
    try:
        with suppress(ModuleNotFoundError):
            importlib.import_module(block)
        runs_block = door in sys.modules
        opened = importlib.import_module(door)
        opened.install(quiet=True)
        for name in imports:
            importlib.import_module(name)
        return Trial(opened.is_active(), runs_block, opened.why_inactive(), opened.left_alone())
    except KohyaBucketError as error:
        return Trial(runs_block=runs_block, refused=str(error))
    except ModuleNotFoundError as error:
        return Trial(runs_block=runs_block, missing=error.name or "", error=str(error))
    except Exception as error:
        return Trial(runs_block=runs_block, error=f"{type(error).__name__}: {error}")


_BLOCK = """{begin}
# Written by `kohya-bucket patch install`; `kohya-bucket patch remove` takes it out again.
try:
    import {door}
except ImportError as missing:
    import sys

    class _WithoutKohyaBucket:
        \"\"\"Ends programs that import what makes datasets; others need no plan.\"\"\"

        text = (
            f"ERROR: this checkout is patched for kohya_bucket, which cannot be imported ({missing}), and would train "
            "WITHOUT it. Install kohya-bucket into this environment, or remove the marked block from " + __file__
        )

        @classmethod
        def find_spec(cls, name, path=None, target=None):
            if name == "{makes_datasets}":
                print(cls.text, file=sys.stderr)
                sys.exit(2)

    if "{makes_datasets}" in sys.modules:
        _WithoutKohyaBucket.find_spec("{makes_datasets}")
    sys.meta_path.insert(0, _WithoutKohyaBucket)
else:
    {door}.install()
{end}
"""


@dataclass(frozen=True)
class CheckoutPatch:
    """One trainer's.

    Attributes:
        trainer: its name, for messages.
        door: the module that opens its door.
        find: the checkout in a folder, or `CheckoutError`.
        file: the file that the block stands in, from the checkout on.
        is_ours: no release has the file: it is made, and taken away with its folder.
        makes_datasets: a module that all programs import that make datasets; where this package is missing, its import
            ends them.
        imports: modules with which everything is imported that the door looks at.
        import_folder: the folder to import them from, from the checkout on.
    """

    trainer: str
    door: str
    find: Callable[[Path], Path]
    file: str
    makes_datasets: str
    imports: tuple[str, ...]
    import_folder: str = "."
    is_ours: bool = False

    @property
    def _module(self) -> str:
        """The name under which the file is imported."""
        return Path(self.file).parent.relative_to(self.import_folder).as_posix().replace("/", ".")

    def _text(self, file: Path) -> str:
        if file.exists():
            return _read(file)
        if self.is_ours:
            return ""
        raise CheckoutError(f"{file} does not exist, but every release has it: restore it with git checkout")

    @property
    def block(self) -> str:
        """What is written."""
        return _BLOCK.format(begin=BEGIN, end=END, missing="{missing}", **vars(self))

    def status(self, folder: Path) -> PatchStatus:
        """Whether the block is in the checkout in `folder`, and whether it is the one this version writes."""
        file = self.find(folder) / self.file
        text = self._text(file)
        block = _find_block(file, text)
        if block is None:
            return PatchStatus(file, False, False)
        # git may have changed the ends of lines, which makes no other version of it
        lines = text[slice(*block)].replace("\r\n", "\n").strip("\n")
        doubled = _find_block(file, text[: block[0]] + text[block[1] :]) is not None
        return PatchStatus(file, True, lines == self.block.strip("\n") and not doubled, _stale(file))

    def install(self, folder: Path) -> PatchStatus:
        """Write the block, or renew an older one. What else the file holds stays as it is."""
        status = self.status(folder)
        if not status.current:
            text = _without_blocks(status.file, self._text(status.file))
            status.file.parent.mkdir(parents=True, exist_ok=True)
            # A file without an end of its last line gets the block without one, too, and so comes out as it was.
            whole = not text or text.endswith("\n")
            _write(status.file, text + (self.block if whole else "\n" + self.block.rstrip("\n")))
        _drop_unchecked(status.file)
        return self.status(folder)

    def remove(self, folder: Path) -> PatchStatus:
        """Take the block out; the file is then byte for byte what it was."""
        status = self.status(folder)
        if status.installed:
            rest = _without_blocks(status.file, _read(status.file))
            if self.is_ours and not rest:
                _remove(status.file)
            else:
                _write(status.file, rest)
        _drop_unchecked(status.file)
        return self.status(folder)

    def attempt(self, root: Path) -> Trial:
        """Import the checkout at `root` with the adapter, in a process of its own, and write nothing there."""
        # where this package is run from a folder, the new process would not find it
        code = f"import sys; sys.path.append({str(_PACKAGES)!r}); from {__name__} import main; main()"
        try:
            done = subprocess.run(
                [sys.executable, "-c", code, str(root / self.import_folder), self.door, self._module, *self.imports],
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
