"""A checkout of sd-scripts: its version, whether the adapter knows it, whether it is patched, what it needs."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

from kohya_bucket.adapter.section import Section
from kohya_bucket.extras import where_this_came_from
from kohya_bucket.sdscripts.checkout import CheckoutError, describe_folder, find_checkout
from kohya_bucket.sdscripts.doctor.packages import version_of
from kohya_bucket.sdscripts.patch import PATCH
from kohya_bucket.texts import some

__all__ = ["checkout_section", "nearby_checkout", "pins_of"]

_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;#]+)")


def nearby_checkout() -> Path | None:
    """The checkout that this command is run in or beside, if there is one."""
    try:
        return find_checkout(Path.cwd())
    except CheckoutError:
        return None


def checkout_section(folder: Path, *, imported: bool = True) -> Section:
    """Look at the checkout in `folder`.

    Args:
        imported: import it in a process of its own, which takes as long as importing torch does.

    Raises:
        CheckoutError: the folder is no checkout.
    """
    root = find_checkout(folder)
    section = Section("sd-scripts")
    section.facts.append(("checkout", describe_folder(root)))
    _patch(section, root)
    if imported:
        _probe(section, root)
    _pins(section, root)
    return section


def pins_of(requirements: Path) -> dict[str, str]:
    """{distribution: version} that a requirements file pins on this machine; empty if it cannot be read."""
    try:
        lines = requirements.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return {}
    return {match[1]: match[2] for line in lines if (match := _PIN.match(line.strip())) and _applies(line)}


def _applies(line: str) -> bool:
    """Whether what stands behind a `;` holds here; no where packaging, which knows that, is not installed."""
    marker = line.partition("#")[0].partition(";")[2].strip()
    try:
        return not marker or bool(importlib.import_module("packaging.markers").Marker(marker).evaluate())
    except (ImportError, ValueError):  # no such marker
        return False


def _patch(section: Section, root: Path) -> None:
    try:
        status = PATCH.status(root)
    except CheckoutError as error:
        section.findings.error("patch", "", str(error))
        return
    if status.current:
        section.facts.append(("patch", "installed: every trainer that is started from here uses kohya_bucket"))
    elif status.installed:
        section.findings.warning(
            "patch-version", "", f"{status.file} holds the block of another kohya_bucket version",
            f"kohya-bucket patch install {root}",
        )  # fmt: skip
    else:
        start = "accelerate launch -m kohya_bucket.launch TRAINER.py …"
        section.facts.append(("patch", f"none; start with {start}, or: kohya-bucket patch install {root}"))


def _probe(section: Section, root: Path) -> None:
    trial = PATCH.attempt(root)
    if trial.active:
        section.facts.append(("adapter", "every part of sd-scripts that it replaces looks as expected"))
    elif trial.refused:
        section.findings.error("adapter-refuses", "", trial.refused)
    elif trial.missing:
        section.findings.error(
            "cannot-import", "", f"in this environment sd-scripts cannot be imported: {trial.error}", _remedy(root)
        )
    else:
        section.findings.error(
            "cannot-import", "", f"importing sd-scripts failed: {trial.error or 'no answer'}", _remedy(root)
        )
    for subject, why in trial.left_alone.items():
        section.findings.warning(
            "left-alone", subject, f"this version is known only in part: {why}; sd-scripts does that by itself",
            "update kohya-bucket, or do without what needs it",
        )  # fmt: skip


def _remedy(root: Path) -> str:
    for name in ("venv", ".venv"):
        for python in (root / name / "bin" / "python", root / name / "Scripts" / "python.exe"):
            if python.is_file() and Path(sys.prefix).resolve() != (root / name).resolve():
                return (
                    f"check the environment that you train in: {python} -m pip install {where_this_came_from()}, then "
                    f"{python} -m kohya_bucket doctor"
                )
    return (
        "run doctor in the environment that you train in, or install here what it needs (pip install -r "
        "requirements.txt "
        f"in {root})"
    )


def _pins(section: Section, root: Path) -> None:
    others = []
    for name, wanted in pins_of(root / "requirements.txt").items():
        installed = version_of(name)
        if installed and installed.split("+")[0] != wanted:
            others.append(f"{name} {installed} ({wanted})")
    if others:
        section.findings.note(
            "other-pins", "",
            f"packages are installed here in other versions than this sd-scripts pins: {some(others)}",
            "nothing, if training works", others,
        )  # fmt: skip
