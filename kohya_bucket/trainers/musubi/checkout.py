"""A checkout of musubi-tuner: where it is, what its code does as far as that differs. It is read, not imported."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kohya_bucket.trainers.door.code import parsed

_PACKAGE = Path("src", "musubi_tuner")
_DATA = Path("dataset", "image_video_dataset.py")


def known_checkout(trainer: Path | None) -> Path | None:
    """The `musubi_tuner` package that is at hand: beside the trainer that was named, in this folder, or installed."""
    for folder in (*(trainer.parents if trainer else ()), Path.cwd()):
        for package in (folder, folder / _PACKAGE):
            if (package / _DATA).is_file():
                return package
    spec = importlib.util.find_spec("musubi_tuner")
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


@cache
def clips_always_in_buckets(package: Path | None) -> bool:
    """Whether clips are put in buckets, and enlarged to them, whatever a config says, as they were up to 0.3.4.

    Since then the code that caches clips hands `enable_bucket` to what chooses their size. With no code at hand, the
    newest rule.
    """
    if package is None:
        return False
    return _uses(package / _DATA, ("VideoDataset", "retrieve_latent_cache_batches"), "enable_bucket") is False


@cache
def lists_are_searched_beside_them(package: Path | None) -> bool:
    """Whether a list of clips may name them relative to its own folder, and have blank lines (since #1023)."""
    if package is None:
        return True
    return bool(_uses(package / "dataset" / "datasources.py", ["VideoJsonlDatasource"], "PATH_KEYS"))


@cache
def keys_of_configs(package: Path | None) -> frozenset[str]:
    """The keys that the code at hand takes in a dataset config; none where there is no code."""
    file = None if package is None else package / "dataset" / "config_utils.py"
    tables = [node for node in ast.walk(parsed(file)) if isinstance(node, ast.Dict)] if file and file.is_file() else []
    inside = (part for table in tables for key in table.keys if key is not None for part in ast.walk(key))
    return frozenset(str(part.value) for part in inside if isinstance(part, ast.Constant))


class Repair(NamedTuple):
    """A text encoder whose outputs were wrong before: the file that loads it, repaired, and what was wrong."""

    file: Path
    before: str


_REPAIRS = {
    "fk": (Path("flux", "flux_utils.py"), "load_t5xxl", "eval", "T5's dropout was active"),
    "i4": (
        Path("ideogram4", "ideogram4_utils.py"), "load_ideogram4_text_encoder", "rotary_emb",
        "its rotary embedding was not initialized",
    ),
}  # fmt: skip


@cache
def repaired_encoder(package: Path | None, family: str) -> Repair | None:
    """How a family's text encoder was repaired, if the code at hand has the repair (of #1139, first in 0.3.6)."""
    if package is None or family not in _REPAIRS:
        return None
    file, function, uses, before = _REPAIRS[family]
    return Repair(package / file, before) if _uses(package / file, [function], uses) else None


def _uses(file: Path, where: Sequence[str], name: str) -> bool | None:
    """Whether the code of a function uses an attribute of that name; None where there is no such function."""
    nodes: list[ast.AST] = [parsed(file)] if file.is_file() else []
    for part in where:
        nodes = [node for tree in nodes for node in ast.walk(tree) if getattr(node, "name", None) == part]
    uses = [node for tree in nodes for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == name]
    return bool(uses) if nodes else None
