"""What is there to train with: this Python, and the packages that this one makes use of."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import sys
from importlib import metadata
from pathlib import Path

from kohya_bucket.extras import EXTRAS
from kohya_bucket.trainers.door.file_findings import Section

_OF_FRAMES = ("anima", "qwen", "wan", "hunyuan_video", "framepack", "kandinsky", "krea", "ltx")  # how their names begin


def packages_section(model: str = "") -> Section:
    """This Python, this package's version, and which packages of its extras are there.

    `model` is what is cached, as far as it is known: some have VAEs that a version of PyTorch makes slow.
    """
    section = Section("this environment", [
        ("kohya-bucket", version_of("kohya-bucket") or "run from a folder, not installed"),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("system", platform.platform()),
    ])  # fmt: skip
    wanted = {name.partition("[")[0]: purpose for names, purpose in EXTRAS.values() for name in names}
    versions = {name: version_of(name) for name in ("numpy", "pillow", *wanted)}
    section.facts.append(("packages", ", ".join(f"{name} {version}" for name, version in versions.items() if version)))
    if absent := [f"{name} ({wanted[name]})" for name, version in versions.items() if not version]:
        section.facts.append(("absent", ", ".join(absent)))
    if version_of("torch"):
        _check_cuda(section)
    if version_of("torch").partition("+")[0] == "2.9.0" and model.replace("-", "_").startswith(_OF_FRAMES):
        section.findings.warning(
            "slow-conv3d", "",
            f"torch 2.9.0 computes 3D convolutions in bfloat16 four times slower, and with up to 17 times the memory: "
            f"the VAE of {model} is made of them (pytorch #166122, #166643)",
            "torch 2.9.1 with cuDNN 9.15, or 2.10",
        )  # fmt: skip
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
