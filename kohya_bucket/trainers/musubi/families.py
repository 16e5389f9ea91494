"""The model family that a name stands for: one of the table, or one that the code of a checkout defines.

Source of what is looked for there: kohya-ss/musubi-tuner 0.3.4, `dataset/architectures.py`, `BucketSelector`, and what
`ImageDataset` and `VideoDataset` begin with; older versions have all of it in one file.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kohya_bucket.buckets.clips import FrameGrid
from kohya_bucket.checks import nearest
from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.door.code import assigned, constants_in, files_in, name_of, parsed, text_of, value_of
from kohya_bucket.trainers.musubi.architectures import ANY, ARCHITECTURES, Family
from kohya_bucket.trainers.musubi.checkout import known_checkout


def architecture_named(word: str | None) -> Family:
    """The family that a name (`wan`, `hunyuan_video`) or a trainer's file (`wan_train_network.py`) stands for.

    None stands for `ANY`. What the table does not have is looked for in the checkout at hand.

    Raises:
        ConfigError: there is none, with the nearest that is; or the checkout cannot be read.
    """
    if word is None:
        return ANY
    path = Path(word)
    trainer = path.resolve() if path.is_file() else None
    package = known_checkout(trainer)
    found = _named(word, ARCHITECTURES) or _named(word, defined_in(package))
    if found is None:
        names = {_letters(family.full_name): family for family in ARCHITECTURES.values()}
        near = f"; the nearest is {names[nearest(_letters(word), names)].long_name}" if _letters(word) else ""
        more = f"{package} defines none of that name"
        if package is None:
            more = "for one that your musubi-tuner defines, name its trainer's path, or run this in its folder"
        raise ConfigError(
            f"--arch is {word!r}, but must be a family of musubi-tuner ({', '.join(long_names())}), or one of its "
            f"trainers, such as wan_train_network.py{near}; {more}"
        )
    return found if trainer is None else replace(found, trainer=trainer)


def _named(word: str, families: Mapping[str, Family]) -> Family | None:
    file = word.replace("\\", "/").rpartition("/")[2]
    for family in families.values():
        files = (start.partition("_train")[0] for start in family.trainers)  # `zebra` of zebra_train_network.py
        names = map(_letters, (family.name, family.full_name, family.title, *files))
        starts = any(re.match(rf"{start}(_|\.)", file) for start in family.trainers)
        if starts if file.endswith(".py") else _letters(word) in names:
            return family
    return None


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def long_names() -> list[str]:
    """What people call all families of the table, in `--arch`."""
    return [family.long_name for family in ARCHITECTURES.values()]


def family_of(name: str | None, package: Path | None) -> Family | None:
    """The family whose caches end in `name`: of the table, or one that the code in a package defines."""
    return ARCHITECTURES.get(name or "") or defined_in(package).get(name or "")


@cache
def defined_in(package: Path | None) -> Mapping[str, Family]:
    """By name, the families for which the code in a package has a step of buckets; none where there is no code.

    It is supposed that their captions are encoded with the images, and that their caches hold control images: where
    that is wrong, outputs are made once too often, and buckets are divided that need not be.

    Raises:
        ConfigError: code that cannot be read.
    """
    if package is None:
        return {}
    code = [node for file in files_in(package / "dataset", "*.py") for node in parsed(file).body]
    nodes = [node for top in code for node in ast.walk(top)]
    values = constants_in(nodes)
    steps_of = dict(assigned(nodes)).get("ARCHITECTURE_STEPS_MAP")
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    begin = [node for kind in ("ImageDataset", "VideoDataset") for node in _beginning(classes.get(kind))]
    # Code that compares with a family's constant anywhere else does more for that family than is known.
    compared_elsewhere = _compared(code)
    compared_elsewhere.subtract(_compared(begin))
    programs = {file.stem: text_of(file) for file in files_in(package, "*.py")}
    found = {}
    for key, steps in zip(steps_of.keys, steps_of.values, strict=True) if isinstance(steps_of, ast.Dict) else ():
        constant = name_of(key)
        name, step = values.get(constant), value_of(steps, values)
        said = {setting: value_of(node, values) for setting, node in _settings(begin, constant)}
        stride, base = said.get("vae_frame_stride") or 4, said.get("vae_frame_base") or 1
        counts = step, stride, base, said.get("control_count_per_image") or 1
        usable = all(type(n) is int and 1 <= n < 1 << 16 for n in counts)
        if not (isinstance(name, str) and usable and _is_rate(said.get("target_fps"))):
            continue
        full_name = str(values.get(f"{constant}_FULL", name))
        trainers = tuple(file for file, text in programs.items() if _has(f"return {constant}", text))
        latents, text = (
            next((f for f in programs if f.endswith(end) and _has(f"architecture={constant}", programs[f])), f"…{end}")
            for end in ("_cache_latents", "_cache_text_encoder_outputs")
        )
        found[name] = Family(
            name, full_name, full_name.replace("_", "-"), trainers, step, said.get("target_fps"),
            FrameGrid(stride, base), defined_in=package, plain=not compared_elsewhere[constant], latents=latents,
            text=text, stride=0, passes=None, sees_controls=True, controls=said.get("control_count_per_image", 1),
            keeps_controls=True,
        )  # fmt: skip
    return found


def _is_rate(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and 0 < value < 1 << 16)


def _has(words: str, text: str) -> bool:
    return re.search(rf"{words}\b", text) is not None


def _beginning(kind: ast.ClassDef | None) -> list[ast.stmt]:
    body = kind.body if kind is not None else []
    return next((node.body for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"), [])


def _compared(nodes: Iterable[ast.AST]) -> Counter[str]:
    """How often each name is in a comparison."""
    inside = (node for top in nodes for node in ast.walk(top) if isinstance(node, ast.Compare))
    return Counter(name_of(node) for compared in inside for node in ast.walk(compared) if isinstance(node, ast.Name))


def _settings(body: Iterable[ast.stmt], constant: str) -> Iterator[tuple[str, ast.expr]]:
    """What statements assign to each name for all, or where something equals a constant."""
    waiting = [*reversed([*body])]
    while waiting:
        statement = waiting.pop()
        if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
            target = statement.target if isinstance(statement, ast.AnnAssign) else statement.targets[0]
            yield name_of(target), statement.value
        elif isinstance(statement, ast.If):
            named = constant in _compared([statement.test])
            waiting += reversed(statement.body if named else statement.orelse)
