"""What the adapter holds on to in a checkout's sources, found by reading them: nothing is imported or run."""

import ast
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

__all__ = ["Definition", "Sources", "watched"]

_NOT_CODE = {"ctx", "kind", "type_comment", "type_ignores", "type_params"}  # differ between versions of Python


_FOREIGN = ("Accelerator", "DataLoader")  # seams of other packages
_COUNT = "NetworkTrainer.train"  # only what it does with its initial step is relied on
_CODE = {"sd-scripts": ("", "library"), "musubi-tuner": ("src/musubi_tuner", "dataset", "qwen_image")}
# What the adapter follows or imitates without taking hold of it.
_BESIDE = {
    "sd-scripts": {
        _COUNT: "resuming", "resize_image": "caching", "pil_resize": "caching", "make_bucket_resolutions": "buckets",
        "generate_dataset_group_by_blueprint": "config", "load_user_config": "config",
    },
    "musubi-tuner": {
        "encode_datasets": "caching", "process_text_encoder_batches": "caching", "divisible_by": "planning",
        "ContentDatasource": "caching", "ImageDatasource": "caching", "ImageDirectoryDatasource": "caching",
        "ImageJsonlDatasource": "caching", "VideoDatasource": "caching", "VideoDirectoryDatasource": "caching",
        "VideoJsonlDatasource": "caching",
    },
}  # fmt: skip


def watched(trainer: str = "sd-scripts") -> list[tuple[str, str]]:
    """(subject, name) of every place in a trainer's own code that the adapter relies on in some version."""
    from kohya_bucket.trainers.musubi.seams import SUBJECTS as MUSUBI_TUNER
    from kohya_bucket.trainers.sdscripts.seams import SUBJECTS as SD_SCRIPTS

    every = SimpleNamespace(has=lambda _: True, find=_find, home=ModuleType("library.train_util"))
    subjects = dict(_BESIDE[trainer])
    for subject in SD_SCRIPTS if trainer == "sd-scripts" else MUSUBI_TUNER:
        for seam in subject.seams_of(every):
            if seam.path.partition(".")[0] not in _FOREIGN:
                subjects.setdefault(seam.path, subject.name)
    return [(subject, path) for path, subject in subjects.items()]


def _find(path: str) -> tuple[None, str, Callable[..., None]]:
    """As in a version where everything is there that seams are chosen by."""
    return None, path, lambda cache_supports_dropout: None  # noqa: ARG005


@dataclass(frozen=True)
class Definition:
    """A class, function or constant. `digest` is of its code alone: comments, docstrings and layout do not count."""

    file: str
    line: int
    digest: str
    takes: str
    names: tuple[str, ...]  # of a function the attributes that it uses, of a class its members, each with its digest


class Sources:
    """The definitions in a checkout's data code and programs.

    Raises:
        SyntaxError: a file that this Python cannot read.
    """

    def __init__(self, root: Path, trainer: str = "sd-scripts") -> None:
        self._found: dict[str, list[tuple[str, ast.AST]]] = {}
        programs, *packages = _CODE[trainer]
        folders = [*(root / programs / package for package in packages), root / programs]
        for file in chain.from_iterable(sorted(folder.glob("*.py")) for folder in folders):
            tree = ast.parse(file.read_bytes(), filename=str(file))
            for node in tree.body:
                for name in _names_of(node):
                    self._found.setdefault(name, []).append((file.relative_to(root).as_posix(), node))

    def find(self, name: str, passed: frozenset[str] = frozenset()) -> Definition | None:
        """The definition of `Class.method`, of what its bases define where it does not, or of a name of a module."""
        first, _, member = name.partition(".")
        for file, node in self._found.get(first, []):
            if not member:
                return _definition(file, node)
            if not isinstance(node, ast.ClassDef):
                continue
            for inner in node.body:
                if member in _names_of(inner):
                    return _count(file, inner) if name == _COUNT else _definition(file, inner)
            for base in {ast.unparse(base).rpartition(".")[2] for base in node.bases} - passed - {first}:
                inherited = self.find(f"{base}.{member}", passed | {first})
                if inherited is not None:
                    return inherited
        return None


def _names_of(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _definition(file: str, node: ast.AST) -> Definition:
    takes = ""
    names = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    if isinstance(node, ast.ClassDef):
        names = {f"{name}:{_digest(inner)[:6]}" for inner in node.body for name in _names_of(inner)}
    elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        takes = _parameters(node.args)
    return Definition(file, getattr(node, "lineno", 0), _digest(node), takes, tuple(sorted(names)))


def _count(file: str, node: ast.AST) -> Definition:
    steps = [step.replace(" ", "") for step in _arithmetic_of(node)]
    digest = hashlib.sha256(repr(steps).encode()).hexdigest()[:12]
    return Definition(file, getattr(node, "lineno", 0), digest, "", tuple(steps))


def _arithmetic_of(train: ast.AST) -> list[str]:
    """What a trainer does with its `initial_step`, in order: `_` is the number, `…` anything else."""
    nodes: Any = ast.walk(train)
    steps = [(node.lineno, node.col_offset, step) for node in nodes if (step := _step(node))]
    return [step for *_, step in sorted(steps)]


_SIGNS = {ast.Mult: "*", ast.FloorDiv: "//", ast.Sub: "-", ast.Add: "+", ast.Mod: "%", ast.Div: "/"}


def _step(node: ast.AST) -> str:
    match node:
        case ast.Assign(targets=[left, *_], value=right):
            sign = "="
        case ast.AugAssign(target=left, op=op, value=right):
            sign = f"{_SIGNS.get(type(op), '?')}="
        case ast.Call(func=ast.Attribute(attr=name), args=args):
            steps = [one for one in args if isinstance(one, ast.BinOp) and _text(one.left) == "_"]
            return f"{name}(_ {_SIGNS.get(type(steps[0].op), '?')} {_text(steps[0].right)})" if steps else ""
        case ast.BinOp(left=left, op=op, right=right):
            if _text(right) == "_":
                return f"… {_SIGNS.get(type(op), '?')} _"
            sign = "" if isinstance(op, ast.Sub) else _SIGNS.get(type(op), "?")
            return f"_ {sign} {_text(right)}" if sign and _text(left) == "_" else ""
        case _:
            return ""
    if _text(left) == "_":
        return f"{sign} {_text(right)}"
    return f"{_text(left)} {sign} _" if _text(right) == "_" else ""


def _text(node: ast.AST) -> str:
    """A constant, a name or an attribute as it stands there; anything else is the trainer's own affair."""
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return {"initial_step": "_", "_": "…"}.get(node.id, node.id) if isinstance(node, ast.Name) else "…"


def _digest(node: ast.AST) -> str:
    return hashlib.sha256(repr(_code(node)).encode()).hexdigest()[:12]


def _parameters(arguments: ast.arguments) -> str:
    ordered = [*arguments.posonlyargs, *arguments.args]
    required = len(ordered) - len(arguments.defaults)
    found = [argument.arg + ("=" if i >= required else "") for i, argument in enumerate(ordered)]
    if arguments.vararg or arguments.kwonlyargs:
        found.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(argument.arg + ("=" if default is not None else ""))
    return ", ".join([*found, *([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])])


def _code(value: object) -> object:
    """Nested tuples that say what the code does, the same in every version of Python."""
    if isinstance(value, list):
        return tuple(_code(item) for item in value)
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = {name: inner for name, inner in ast.iter_fields(value) if name not in _NOT_CODE}
    if isinstance(value, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        first = value.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            fields["body"] = value.body[1:]
    return (type(value).__name__, *((name, _code(inner)) for name, inner in fields.items()))
