"""What is installed here, and what each missing package is for."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from kohya_bucket.adapter.section import Section
from kohya_bucket.extras import EXTRAS, PURPOSES, pip_install

__all__ = ["cuda_of_torch", "packages_section", "version_of"]

_ALWAYS = ("numpy", "pillow")


def packages_section() -> Section:
    """This Python, this package's version, and the packages of each of its extras."""
    section = Section("this environment")
    section.facts += [
        ("kohya-bucket", version_of("kohya-bucket") or "run from a folder, not installed"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("system", platform.platform()),
    ]
    section.facts += [(name, version_of(name) or "not installed") for name in _ALWAYS]
    for extra, names in EXTRAS.items():
        found = {name: version_of(name) for name in (name.partition("[")[0] for name in names)}
        here = ", ".join(f"{name} {version}" for name, version in found.items() if version)
        missing = ", ".join(name for name, version in found.items() if not version)
        lack = f"no {missing} (for {PURPOSES[extra]}: {pip_install(extra)})" if missing else ""
        section.facts.append((extra, "; ".join(filter(None, [here, lack]))))
    if version_of("torch"):
        _check_cuda(section)
    return section


def version_of(name: str) -> str:
    """The installed version of a distribution, "" if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def cuda_of_torch() -> str | None:
    """The CUDA version that the installed torch is built for; "" for none, None if it does not say.

    Read from its files: importing torch takes seconds.
    """
    spec = importlib.util.find_spec("torch")
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8") if spec and spec.origin else ""
    except OSError:
        return None
    match = re.search(r"^cuda\b[^=]*=\s*(?:None|'([^']*)')", text, re.MULTILINE)
    return (match[1] or "") if match else None


def _check_cuda(section: Section) -> None:
    cuda = cuda_of_torch()
    if cuda:
        section.facts.append(("CUDA", f"torch is built for {cuda}"))
    elif cuda == "" and shutil.which("nvidia-smi"):
        section.findings.warning(
            "torch-without-cuda", "",
            f"an NVIDIA driver is installed, but torch {version_of('torch')} is built without CUDA, so that all would "
            "run on the processor",
            "install torch for your CUDA version as pytorch.org/get-started says",
        )  # fmt: skip
