"""Renames one name of sd-scripts at a time in a copy of a checkout, and tells what the adapter makes of it.

Run as a program: `renaming.py CHECKOUT OUT.json`. Heavy packages are imported once; each renaming is tried in a fork.
"""

from __future__ import annotations

import ast
import compileall
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


class Copy:
    """A copy of a checkout: parsed and compiled once, since many names are renamed in it, one after the other.

    Attributes:
        root: where it lies.
        files: {file: (text, tree)} of what a trainer imports before the adapter is in, and of what it reads itself.
    """

    def __init__(self, checkout: Path, root: Path, imported: list[str]) -> None:
        self.root = root
        keep = {"library", "networks", "train_network.py"}
        shutil.copytree(checkout, root, ignore=lambda at, names: set(names) - keep if at == str(checkout) else [])
        compileall.compile_dir(root, quiet=2)
        self.files = {}
        for name in [*imported, "train_network.py"]:
            text = (root / name).read_text(encoding="utf-8-sig")
            self.files[root / name] = (text, ast.parse(text))

    def rename(self, old: str) -> int:
        """Rename `old` everywhere, on disk; how often it stood there. Trees are used up: call it in a fork."""
        count = 0
        for file, (text, tree) in self.files.items():
            if old not in text:
                continue
            change = _Rename(old, f"{old}_of_another_version")
            tree = change.visit(tree)
            if change.count:
                file.write_text(ast.unparse(tree), encoding="utf-8")
                count += change.count
        return count

    def try_name(self, old: str) -> dict[str, Any]:
        """What `install()` makes of the copy without a name; in this process, which must not have imported it."""
        return {"count": self.rename(old), **outcome(self.root)}

    def restore(self, states: dict[Path, os.stat_result], contents: dict[Path, bytes]) -> None:
        """Put back what was changed, with its time, so that what was compiled of it is valid again."""
        for file, state in states.items():
            if file.stat().st_mtime_ns != state.st_mtime_ns:
                file.write_bytes(contents[file])
                os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


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


def names_of(checkout: Path) -> tuple[dict[str, list[str]], list[str]]:
    """({name: subjects that rely on it} of all seams of a checkout, the files of it that are imported by then)."""
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
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    library = (checkout / "library").resolve()
    imported = [Path(file).resolve() for file in files if file and file.endswith(".py")]
    return found, sorted(file.relative_to(library.parent).as_posix() for file in imported if library in file.parents)


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

    answer = in_fork(names_of, checkout)
    if "error" in answer:
        raise SystemExit(answer["error"])
    names, imported = answer
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(checkout, Path(folder) / "sd", imported)
        states = {file: file.stat() for file in copy.files}
        contents = {file: file.read_bytes() for file in copy.files}
        for name, subjects in names.items():
            rows.append({"name": name, "subjects": subjects, "count": 0, **in_fork(copy.try_name, name)})
            copy.restore(states, contents)
    out.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]))
