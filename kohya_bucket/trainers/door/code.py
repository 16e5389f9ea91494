"""A trainer's code, read and not imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kohya_bucket.errors import ConfigError


def parsed(file: Path) -> ast.Module:
    """The code in a file. Raises `ConfigError` where this Python cannot read it."""
    try:
        return ast.parse(file.read_bytes())  # Python knows its byte order marks and declared encodings
    except (OSError, SyntaxError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; it is to say what this trainer trains") from error


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
    if isinstance(node, ast.IfExp):
        return value_of(node.orelse, constants)
    return node.value if isinstance(node, ast.Constant) else constants.get(name_of(node))
