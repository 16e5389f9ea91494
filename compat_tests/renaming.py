"""Changes one thing at a time in a copy of a trainer's checkout, and tells what the adapter makes of it.

Each name that a seam relies on is renamed, and each function that a seam names takes a parameter more: one that may be
left out, then one that may not. Run as a program: `renaming.py ROOM CHECKOUT OUT.json`, with a trainer's room. Heavy
packages are imported once; each change is tried in a fork.
"""

import ast
import compileall
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from absent_packages import pass_over_absent

HERE = Path(__file__).resolve().parent
ADDED = "added_in_another_version"


@dataclass(frozen=True)
class Trainer:
    """Where a trainer's code lies in a checkout, and what a run of it imports."""

    source: str
    package: str
    keep: frozenset[str]
    imports: tuple[str, ...]
    reads: tuple[str, ...] = ()  # files whose text the adapter reads

    def load(self) -> list[ModuleType]:
        """Import what a run imports."""
        if self.package == "toolkit":
            pass_over_absent()
        return [importlib.import_module(name) for name in self.imports]


TRAINERS = {
    "sdscripts": Trainer(
        "", "library", frozenset({"library", "networks", "train_network.py"}),
        ("library.config_util", "library.train_util"), ("train_network.py",),
    ),
    "musubi": Trainer("src", "musubi_tuner", frozenset({"musubi_tuner"}), ("musubi_tuner.dataset.config_utils",)),
    "ai_toolkit": Trainer("", "toolkit", frozenset({"toolkit", "info.py", "version.py"}), ("toolkit.data_loader",)),
    "anima_lora": Trainer(
        "", "library", frozenset({"library", "networks", "train.py"}),
        ("library.config.loader", "library.config.io", "library.datasets.collator", "library.training.loop"),
    ),
}  # fmt: skip


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
        return node if node.module in (None, "library", "musubi_tuner") else self.generic_visit(node)


class _Add(ast.NodeTransformer):
    """A parameter more, which the function tells of when it is given; `qualified` is its name in its module."""

    def __init__(self, qualified: str, *, required: bool) -> None:
        self.outer, _, self.name = qualified.rpartition(".")
        self.required, self.count, self.inside = required, 0, ""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self.inside = node.name
        self.generic_visit(node)
        self.inside = ""
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if (node.name, self.inside) != (self.name, self.outer):
            return node
        self.count += 1
        if self.required:
            node.args.kwonlyargs.append(ast.arg(ADDED))
            node.args.kw_defaults.append(None)
        else:
            node.args.args.append(ast.arg(ADDED))
            node.args.defaults.append(ast.Constant(None))
        node.body.insert(0, ast.parse(f"if {ADDED} is not None: raise RuntimeError({ADDED!r})").body[0])
        return ast.fix_missing_locations(node)


class Copy:
    """A copy of a checkout: parsed and compiled once, since many changes are made in it, one after the other.

    Attributes:
        root: where it lies.
        files: {file: (text, tree)} of what a trainer imports before the adapter is in, and of what it reads itself.
    """

    def __init__(self, checkout: Path, trainer: Trainer, root: Path, imported: list[str]) -> None:
        self.root = root
        source = checkout / trainer.source
        shutil.copytree(source, root, ignore=lambda at, names: set(names) - trainer.keep if at == str(source) else [])
        compileall.compile_dir(root, quiet=2)
        self.files = {}
        for name in [*imported, *trainer.reads]:
            text = (root / name).read_text(encoding="utf-8-sig")
            self.files[root / name] = (text, ast.parse(text))

    def change(self, word: str, change: Any) -> int:
        """Change it everywhere, on disk; how often it was found. Trees are used up: call it in a fork."""
        count = 0
        for file, (text, tree) in self.files.items():
            if word in text:
                tree = change.visit(tree)
                if change.count:
                    file.write_text(ast.unparse(tree), encoding="utf-8")
                    count, change.count = count + change.count, 0
        return count

    def restore(self, states: dict[Path, os.stat_result], contents: dict[Path, bytes]) -> None:
        """Put back what was changed, with its time, so that what was compiled of it is valid again."""
        for file, state in states.items():
            if file.stat().st_mtime_ns != state.st_mtime_ns:
                file.write_bytes(contents[file])
                os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


def outcome(name: str, root: Path) -> dict[str, Any]:
    """What the door says in a checkout, in this process, which must not have imported it."""
    door = opened(name)
    sys.path.insert(0, str(root))
    door.open(quiet=True)
    try:
        TRAINERS[name].load()
    except BaseException:
        return {"error": traceback.format_exc(limit=-3)}
    return {"active": door.is_active(), "why": door.why_inactive(), "left_alone": door.left_alone()}


def try_name(name: str, copy: Copy, old: str) -> dict[str, Any]:
    """What becomes of a copy without a name."""
    return {"count": copy.change(old, _Rename(old, f"{old}_of_another_version")), **outcome(name, copy.root)}


def try_parameter(name: str, copy: Copy, path: str, qualified: str, *, required: bool) -> dict[str, Any]:
    """What becomes of a copy in which a function takes more, and of a call that gives it."""
    count = copy.change(path.rpartition(".")[2], _Add(qualified, required=required))
    return {"count": count, **outcome(name, copy.root), "given": given(name, path)}


def given(name: str, path: str) -> str:
    """What comes of a call with the added parameter: it is passed on, the run ends, or something else."""
    found = opened(name).owners.find(path)[2]
    function = getattr(found, "__func__", found)
    taken = inspect.signature(function).parameters.values()
    made_up = {one.name: MagicMock() for one in taken if one.default is one.empty and one.kind not in (2, 4)}
    made_up |= {"args": Namespace(), "file": str(HERE.parent / "pyproject.toml"), "self": MagicMock(), ADDED: 1}
    made_up |= {"image": np.zeros((4, 4, 3), np.uint8), "resized_size": (4, 4)}
    cache = os.path.join(tempfile.gettempdir(), "added.safetensors")
    item = Namespace(latent_cache_path=cache, text_encoder_output_cache_path=cache)
    made_up |= {"item_info": item, "sd": {}}
    try:
        answer = function(**{key: value for key, value in made_up.items() if key in {one.name for one in taken}})
        list(answer if isinstance(answer, Iterator) else ())
    except RuntimeError as error:
        return "passed on" if str(error) == ADDED else repr(error)
    except SystemExit as error:
        return "ended" if ADDED in str(error) or "does not go on without it" in str(error) else repr(error)
    except BaseException:
        return traceback.format_exc(limit=-3)
    return "was lost"


def opened(name: str) -> Any:
    return importlib.import_module(f"kohya_bucket.trainers.{name}.door").DOOR


def seams_of(name: str, root: Path) -> Iterator[tuple[Any, Any, Any]]:
    """(subject, seam, what is there) of a checkout, which is imported without being changed."""
    from kohya_bucket.trainers.door.seams import Owners

    sys.path.insert(0, str(root))
    TRAINERS[name].load()
    door = type(opened(name))()
    home = door.home()
    assert home is not None
    owners = Owners(door.package, home, door.complete())
    for subject in door.subjects():
        for seam in subject.seams_of(owners):
            if seam.path.split(".")[0] not in owners.foreign:
                yield subject, seam, owners.find(seam.path)[2]


def names_of(seam: Any) -> set[str]:
    """Every name of the trainer that a seam relies on."""
    taken = inspect.signature(seam.replacement).parameters if inspect.isfunction(seam.replacement) else {}
    own = [one for one in list(taken.values())[1:] if one.default is one.empty]  # without the seam
    named = {one.name for one in own if one.kind is one.POSITIONAL_OR_KEYWORD}
    return {*seam.path.split("."), *named, *(name for check in seam.checks for name in check.names)} - {"self"}


def relied_on(name: str, root: Path) -> dict[str, Any]:
    """{names, functions, imported} of a checkout: all that its seams rely on, and the files that it imports."""
    from torch.utils.data import ConcatDataset

    from kohya_bucket.trainers.door.shapes import attributes_of

    torchs = attributes_of(ConcatDataset)  # what groups inherit is not the trainer's to rename
    names: dict[str, list[str]] = {}
    functions: dict[str, tuple[str, list[str]]] = {}
    for subject, seam, value in seams_of(name, root):
        for relied in names_of(seam) - torchs - {"path", "device", "save_file"}:  # of os, torch and safetensors too
            if not relied.startswith("__"):  # what Python itself calls has no other name
                names.setdefault(relied, []).append(subject.name)
        function = inspect.unwrap(getattr(value, "__func__", value))
        if inspect.isfunction(function) and function.__module__.startswith(TRAINERS[name].package):
            functions.setdefault(seam.path, (function.__qualname__, []))[1].append(subject.name)
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    imported = [Path(file).resolve() for file in files if file and file.endswith(".py")]
    inside = [file for file in imported if root / TRAINERS[name].package in file.parents]
    return {"names": names, "functions": functions, "imported": sorted(f.relative_to(root).as_posix() for f in inside)}


def unseen(name: str, checkout: Path, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """(number of changes that were tried, those that the adapter does not notice), in a process of its own.

    A name that is gone makes its subjects unknown. So does a parameter more, or a call that gives it reaches the
    trainer's own function or ends the run.
    """
    out = folder / "changes.json"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", __file__, name, str(checkout.resolve()), str(out)]
    # in that folder, since a call with made-up arguments may make files
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    rows = json.loads(out.read_text(encoding="utf-8"))
    subjects = importlib.import_module(f"kohya_bucket.trainers.{name}.seams").SUBJECTS
    ordering = {subject.name for subject in subjects if subject.orders_epochs}

    def is_seen(row: dict[str, Any]) -> bool:
        if "error" in row or not row["count"]:
            return False
        if not row["active"] and row["why"]:  # a name of one subject may be a parameter in another one, too
            return True
        if not ordering & set(row["subjects"]) and set(row["subjects"]) <= set(row["left_alone"]):
            return True
        return row.get("given") in ("passed on", "ended")

    return len(rows), [row for row in rows if not is_seen(row)]


def with_other_behaviour(name: str, checkout: Path, change: str) -> dict[str, Any]:
    """What the adapter makes of a trainer in which some code changes a function, in a process of its own."""
    trainer = TRAINERS[name]
    lines = [
        "import importlib, json, sys", f"sys.path.insert(0, {str(checkout / trainer.source)!r})",
        f"sys.path.append({str(HERE)!r}); import renaming; modules = renaming.TRAINERS[{name!r}].load()", change,
        f"from kohya_bucket.trainers.{name}.door import DOOR as door", "try: door.open(quiet=True)",
        "except Exception as error: pass",
        "print(json.dumps([door.is_active(), door.why_inactive(), door.left_alone()]))",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", "\n".join(lines)],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(zip(("active", "why", "left_alone"), json.loads(done.stdout.splitlines()[-1]), strict=True))


def in_fork(work: Callable[..., Any], *arguments: Any, **keys: Any) -> Any:
    """The answer of a function that runs in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.close(read)
        try:
            answer = work(*arguments, **keys)
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


def main(name: str, checkout: Path, out: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.dont_write_bytecode = True
    for package in (
        "accelerate",
        "diffusers",
        "transformers",
        "cv2",
        "torchvision.transforms",
        "torch.utils.data",
        "av",
    ):
        try:
            importlib.import_module(package)
        except ImportError:
            continue
    from diffusers import AutoencoderKL  # noqa: F401  (is imported on first use)
    from transformers import CLIPTextModel, CLIPTokenizer  # noqa: F401

    trainer = TRAINERS[name]
    found = in_fork(relied_on, name, checkout / trainer.source)
    if "error" in found:
        raise SystemExit(found["error"])
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(checkout, trainer, Path(folder).resolve() / "copy", found["imported"])
        states = {file: file.stat() for file in copy.files}
        contents = {file: file.read_bytes() for file in copy.files}

        def note(subjects: list[str], row: dict[str, Any], answer: dict[str, Any]) -> None:
            rows.append({**row, "subjects": subjects, **answer})
            copy.restore(states, contents)

        for old, subjects in found["names"].items():
            note(subjects, {"renamed": old}, in_fork(try_name, name, copy, old))
        for path, (qualified, subjects) in found["functions"].items():
            for required in (False, True):
                answer = in_fork(try_parameter, name, copy, path, qualified, required=required)
                note(subjects, {"more": path, "required": required}, answer)
    out.write_text(json.dumps(rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]))
