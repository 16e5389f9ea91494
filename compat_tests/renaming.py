"""Renames one name of sd-scripts at a time in a copy of a checkout, and tells what the adapter makes of it.

Run as a program: `renaming.py CHECKOUT OUT.json`. Heavy packages are imported once; each renaming is tried in a fork.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any


class _Rename(ast.NodeTransformer):
    """Identifiers, and texts that are one (keys of dictionaries), but no module's name."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new, self.count = old, new, 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in ("id", "attr", "arg", "name"):
            if getattr(node, field, None) == self.old:
                setattr(node, field, self.new)
                self.count += 1
        if isinstance(node, ast.Constant) and node.value == self.old:
            node.value = self.new
            self.count += 1
        return node

    def visit_Import(self, node: ast.Import) -> ast.AST:
        return node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST:
        # what is imported from the package itself are modules
        return node if node.module in (None, "library") else self.generic_visit(node)


def rename(checkout: Path, old: str) -> int:
    """Rename `old` in every module of a checkout; how often it stood there."""
    count = 0
    for file in [*checkout.glob("*.py"), *checkout.glob("library/*.py")]:
        text = file.read_text(encoding="utf-8-sig")
        if old not in text:
            continue
        change = _Rename(old, f"{old}_of_another_version")
        tree = change.visit(ast.parse(text))
        if change.count:
            file.write_text(ast.unparse(tree), encoding="utf-8")
            count += change.count
    return count


def outcome(checkout: Path) -> dict[str, Any]:
    """What `install()` says in a checkout, in this process, which must not have imported it."""
    from kohya_bucket import sdscripts

    sys.path.insert(0, str(checkout))
    sdscripts.install(quiet=True)
    try:
        for name in ("library.config_util", "library.train_util"):
            importlib.import_module(name)
    except BaseException:
        return {"error": traceback.format_exc(limit=-3)}
    return {
        "active": sdscripts.is_active(), "why": sdscripts.why_inactive(), "left_alone": sdscripts.left_alone(),
    }  # fmt: skip


def names_of(checkout: Path) -> dict[str, list[str]]:
    """{name: subjects that rely on it} of all seams of a checkout."""
    from torch.utils.data import ConcatDataset

    from kohya_bucket.adapter.seams import Owners
    from kohya_bucket.adapter.shapes import attributes_of
    from kohya_bucket.sdscripts.door import SdScriptsDoor
    from kohya_bucket.sdscripts.seams import SUBJECTS

    sys.path.insert(0, str(checkout))
    door = SdScriptsDoor()
    foreign = door.complete()
    home = door.home()
    assert home is not None
    owners = Owners(door.package, home, foreign)
    torchs = attributes_of(ConcatDataset)  # what groups inherit is not sd-scripts' to rename
    found: dict[str, list[str]] = {}
    for subject in SUBJECTS:
        for seam in subject.seams_of(owners):
            if seam.path.split(".")[0] not in foreign:
                for name in set(seam.names) - torchs:
                    if not name.startswith("__"):  # what Python itself calls has no other name
                        found.setdefault(name, []).append(subject.name)
    return found


def in_fork(work: Any, *arguments: Any) -> Any:
    """The answer of a function that runs in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            answer = work(*arguments)
        except BaseException:
            answer = {"error": traceback.format_exc(limit=-3)}
        with os.fdopen(write, "w", encoding="utf-8") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"error": "no answer"}


def main(checkout: Path, out: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.dont_write_bytecode = True
    for name in ("accelerate", "diffusers", "transformers", "cv2", "torchvision.transforms", "torch.utils.data"):
        importlib.import_module(name)
    from diffusers import AutoencoderKL  # noqa: F401  (is imported on first use)
    from transformers import CLIPTextModel, CLIPTokenizer  # noqa: F401

    names = in_fork(names_of, checkout)
    if "error" in names:
        raise SystemExit(names["error"])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, subjects in names.items():
            copy = Path(folder) / "sd"
            shutil.copytree(
                checkout, copy, ignore=lambda at, _: [] if Path(at).name == "library" else _not_needed(Path(at))
            )
            count = rename(copy, name)
            rows.append({"name": name, "subjects": subjects, "count": count, **in_fork(outcome, copy)})
            shutil.rmtree(copy)
    out.write_text(json.dumps(rows), encoding="utf-8")


def _not_needed(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.name != "library" and entry.suffix != ".py"]


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
