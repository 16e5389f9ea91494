"""Checkouts of trainers on this machine: which version one is, which Python runs it, which sd-scripts is the newest."""

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "MUSUBI_TUNER", "PREFIX", "SD_SCRIPTS", "Checkout", "CheckoutError", "checkouts_folder", "commit_of",
    "environment_of", "identify", "newest",
]  # fmt: skip

SD_SCRIPTS, MUSUBI_TUNER = "sd-scripts", "musubi-tuner"
PREFIX = "musubi-"


class CheckoutError(Exception):
    """A folder that is not a checkout, or one without an environment; the text is one line for the user."""


@dataclass(frozen=True)
class Checkout:
    """One version of a trainer in a folder. `commit` and `date` (of the commit, ISO) are empty where unknown."""

    root: Path
    name: str
    commit: str
    date: str
    trainer: str = SD_SCRIPTS

    @property
    def version(self) -> str:
        return self.name.removeprefix(PREFIX)

    @property
    def is_fork(self) -> bool:
        return self.version.startswith("fork")


def identify(root: str | Path) -> Checkout:
    """Which version lies in a folder, from git, or from a line `COMMIT DATE` in its file `.laid` where there is no git.

    Its name is git's tag, else the folder's name; a folder called `fork-…` holds somebody else's version. Names of
    musubi-tuner's versions begin with `musubi-`.

    Raises:
        CheckoutError: no trainer is there.
    """
    root = Path(os.path.abspath(Path(root).expanduser()))  # a link stays one: the environment lies beside it
    if (root / "src" / "musubi_tuner").is_dir():
        trainer, prefix = MUSUBI_TUNER, PREFIX
    elif (root / "library").is_dir() and (root / "train_network.py").is_file():
        trainer, prefix = SD_SCRIPTS, ""
    else:
        raise CheckoutError(
            f"{root} is not a checkout of sd-scripts, with library/ and train_network.py, nor of musubi-tuner, with "
            "src/musubi_tuner/"
        )
    if (root / ".git").exists():
        commit, _, date = _git(root, "log", "-1", "--format=%H %cs").partition(" ")
        tag = _git(root, "tag", "--points-at", "HEAD").partition("\n")[0]
        return Checkout(root, prefix + (tag or root.name).removeprefix(prefix), commit, date, trainer)
    laid = root / ".laid"
    commit, _, date = laid.read_text(encoding="utf-8").strip().partition(" ") if laid.is_file() else ("", "", "")
    return Checkout(root, prefix + root.name.removeprefix(prefix), commit, date, trainer)


def environment_of(root: Path) -> Path | None:
    """The Python of the virtual environment that lies in a checkout or beside it.

    The first of `.venv` and `venv` in it, `NAME-venv` beside it, and `.venv` and `venv` beside it.
    """
    beside = root.parent
    for folder in (root / ".venv", root / "venv", beside / f"{root.name}-venv", beside / ".venv", beside / "venv"):
        for python in (folder / "bin" / "python", folder / "Scripts" / "python.exe"):
            if python.is_file():
                return python
    return None


def checkouts_folder() -> Path:
    """Where several checkouts lie side by side."""
    return Path(os.environ.get("KOHYA_BUCKET_CHECKOUTS") or "~/.cache/kohya_bucket/checkouts").expanduser()


def newest(folder: Path) -> Checkout | None:
    """The youngest of sd-scripts' own versions in a folder that have an environment."""
    own = [one for one in _all(folder) if one.trainer == SD_SCRIPTS and not one.is_fork]
    found = [checkout for checkout in own if environment_of(checkout.root)]
    return max(found, key=lambda checkout: (checkout.date, checkout.name), default=None)


def _all(folder: Path) -> Iterator[Checkout]:
    for root in sorted(folder.iterdir()) if folder.is_dir() else []:
        try:
            yield identify(root)
        except CheckoutError:
            continue


def commit_of(root: Path) -> str:
    """The short commit of a working tree, with a `+` where something in it is not committed; empty without git."""
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    return _git(root, "rev-parse", "--short=8", "HEAD") + ("+" if changed else "")


def _git(root: Path, *command: str) -> str:
    try:
        answer = subprocess.run(
            ["git", "-C", str(root), *command], capture_output=True, text=True, encoding="utf-8", timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return answer.stdout.strip()
