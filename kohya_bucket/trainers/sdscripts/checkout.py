"""A checkout of sd-scripts on disk: where it is, and which version."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
from pathlib import Path

from kohya_bucket.checks import path_meant
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.inputs import MAX_CONFIG_BYTES, read_input
from kohya_bucket.trainers.door.code import constants_in, files_in, name_of, parsed, text_of, value_of
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES, NEEDED, Family

_SINCE_0_10 = "strategy_base.py"
# what versions brought, the newest first
_BROUGHT = {"0.12": "cv2_compat.py", "0.11": "dataset.py", "0.10": _SINCE_0_10}
_VERIFIED = re.compile(r"\.verify_bucket_reso_steps\(\s*(\d{1,4})\s*\)")


class SeamError(KohyaBucketError):
    """sd-scripts looks different from every version this adapter knows; nothing was replaced."""


class CheckoutError(KohyaBucketError):
    """The folder is not a checkout of sd-scripts."""


class OldCheckoutError(KohyaBucketError):
    """A checkout of a version that is too old."""


def runs_anima_lora() -> bool:
    """Whether the package `library` of this process is anima_lora's."""
    return any(is_anima_lora(Path(folder)) for folder in getattr(sys.modules.get("library"), "__path__", ()))


def is_anima_lora(package: Path) -> bool:
    """Whether a folder `library` is that of anima_lora, whose datasets came from sd-scripts."""
    return (package / "anima" / "text_strategies.py").is_file() and (package / "datasets" / "base.py").is_file()


def find_checkout(folder: Path) -> Path:
    """The sd-scripts checkout at `folder`, or in its `sd-scripts` (as the kohya_ss GUI brings it along).

    Raises:
        CheckoutError: neither is one.
        OldCheckoutError: one is, but older than 0.10.1.
    """
    for candidate in (folder, folder / "sd-scripts"):
        library = candidate / "library"
        if is_anima_lora(library):
            continue
        if (library / "train_util.py").is_file() or (
            library.is_dir() and (candidate / "train_network.py").is_file()
        ):  # that module has been taken apart once
            if not (library / _SINCE_0_10).is_file():
                raise OldCheckoutError(f"{candidate} is too old: {NEEDED}")
            return candidate
    submodule = folder / "sd-scripts"
    if _has_submodule(folder) and not (submodule.is_dir() and any(submodule.iterdir())):
        is_clone = (folder / ".git").exists()
        remedy = f"git -C {folder} submodule update --init" if is_clone else "git clone --recursive, not a .zip file"
        raise CheckoutError(f"{submodule} is empty: the GUI's sd-scripts was not fetched; get it with {remedy}")
    if not folder.exists():
        raise CheckoutError(f"{folder} does not exist: {path_meant(folder)}")
    raise CheckoutError(
        f"{folder} is not an sd-scripts checkout: neither it nor its sd-scripts folder has library/ beside "
        f"train_network.py; name the folder that train_network.py lies in"
    )


def _has_submodule(folder: Path) -> bool:
    modules = folder / ".gitmodules"
    return modules.is_file() and b"sd-scripts" in read_input(modules, MAX_CONFIG_BYTES)


def has_patch(root: Path) -> bool:
    """Whether the block of `patches/library-init.patch` stands in the checkout."""
    init = root / "library" / "__init__.py"
    return init.is_file() and "kohya_bucket" in text_of(init)


def nearby_checkout() -> Path | None:
    """The checkout that this command is run in or beside, if there is one."""
    try:
        return find_checkout(Path.cwd())
    except CheckoutError:
        return None


def npz_version(root: Path) -> str:
    """A version of sd-scripts that reads npz as the checkout in a folder does: "0.10.1", or "" for the newest.

    Its strategy for SD and SDXL says so, in words that 0.10.2 brought; nothing is imported.
    """
    file = root / "library" / "strategy_sd.py"
    plain = file.is_file() and "multi_resolution=True" not in text_of(file)
    return "0.10.1" if plain else ""


def steps_in(root: Path) -> dict[str, int]:
    """{trainer's file: what `bucket_reso_steps` must be a multiple of there}, by its source; nothing is imported."""
    steps_of = {}
    for file in files_in(root, "*.py"):
        steps = set(map(int, _VERIFIED.findall(text_of(file))))
        least = math.lcm(*(step for step in steps if step))
        if 1 < least < 1 << 16:  # no model has a greater one
            steps_of[file.name] = least
    return steps_of


def own_programs(root: Path, word: str) -> Programs | None:
    """The trainers that a model's name (`krea2`) or a file stands for, where no table here has them but a checkout."""
    name = Path(word.replace("\\", "/")).name.removesuffix(".py")
    steps = steps_in(root)
    files = {
        file.name: steps.get(file.name, 1)
        for file in files_in(root, "*train*.py")
        if file.stem == name or file.name.startswith(f"{name}_train")
    }
    return Programs(f"{name}, of the checkout {root}", files) if files else None


def own_families(root: Path) -> list[Family]:
    """The families whose latents the strategies of a checkout cache, where no table here has their ending.

    How many channels their latents have is not known, which is 0 here. One whose keys cannot be told is left out.
    """
    strides: dict[str, int | None] = {}  # of each class; one that names none has that of its base
    known, found = {family.suffix for family in ARCHITECTURES.values()}, []
    for file in files_in(root / "library", "strategy_*.py"):
        tree = parsed(file)
        constants = constants_in(ast.walk(tree))
        for kind in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            calls = [node for node in ast.walk(kind) if isinstance(node, ast.Call) and node.args]
            loads = [call.args[0] for call in calls if name_of(call.func) == "_default_load_latents_from_disk"]
            inherited = next(filter(None, map(strides.get, map(name_of, kind.bases))), None)
            stride = value_of(loads[0], constants) if loads else inherited
            strides[kind.name] = stride
            for suffix in map(str, constants_in(kind.body).values()):
                if stride and suffix.endswith(".npz") and suffix != ".npz" and suffix not in known:
                    name = suffix.strip("_").removesuffix(".npz")
                    found.append(Family(name=name, title=name, stride=stride, channels=0, suffix=suffix))
    return found


def describe_folder(root: Path) -> str:
    """The version of the checkout in a folder, and the folder. Without git its modules tell, as seams do."""
    if (root / ".git").exists():  # not that of a folder around it
        try:
            git = ["git", "-C", str(root), "describe", "--tags", "--always"]
            answer = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True)
            return f"{answer.stdout.strip()} at {root}"
        except (OSError, subprocess.SubprocessError):
            pass
    versions = (version for version, file in _BROUGHT.items() if (root / "library" / file).exists())
    return f"{next(versions, 'before 0.10')} (by its modules) at {root}"
