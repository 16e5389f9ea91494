"""A trainer's code, read and not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.inputs import read_input


def parsed(file: Path) -> ast.Module:
    """The code in a file. Raises `ConfigError` where this Python cannot read it."""
    with _code_in(file):
        return ast.parse(read_input(file, _MOST))  # Python knows its byte order marks and declared encodings


def text_of(file: Path) -> str:
    """The same as text, whatever it is. Raises `ConfigError` where it cannot be read."""
    with _code_in(file):
        return read_input(file, _MOST).decode("utf-8", "replace")


_MOST = 1 << 22  # bytes of a source


@contextmanager
def _code_in(file: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        why = str(error) or type(error).__name__
        raise ConfigError(f"{file} cannot be read: {why}; it is to say what this trainer trains") from error


def files_in(folder: Path, pattern: str) -> list[Path]:
    """The files in a folder whose names match, without hidden ones: an editor's lock is a link that leads nowhere."""
    return sorted(file for file in folder.glob(pattern) if file.is_file() and not file.name.startswith("."))


def assigned(nodes: Iterable[ast.AST]) -> list[tuple[str, ast.expr]]:
    """The name and value of each plain assignment among nodes."""
    return [(name_of(node.targets[0]), node.value) for node in nodes if isinstance(node, ast.Assign)]


def constants_in(nodes: Iterable[ast.AST]) -> dict[str, Any]:
    """The constants that are assigned, by name."""
    return {name: node.value for name, node in assigned(nodes) if isinstance(node, ast.Constant)}


def name_of(node: ast.expr | None) -> str:
    """`NAME`, or the last one of `owner.NAME`; "" for anything else."""
    return str(getattr(node, "id", getattr(node, "attr", "")))


def value_of(node: ast.expr, constants: Mapping[str, Any]) -> Any:
    """What an expression stands for; of a choice, what nobody asked for gives. None where that is unknown."""
    while isinstance(node, ast.IfExp):
        node = node.orelse
    return node.value if isinstance(node, ast.Constant) else constants.get(name_of(node))
