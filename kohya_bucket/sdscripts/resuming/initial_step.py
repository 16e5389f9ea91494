"""`--initial_step`, as a number that comes through `train_network.py`'s arithmetic as it is.

The trainer multiplies the number of the first update by the accumulation, divides that by updates to get the first
epoch, and takes whole epochs of batches off it, whose rest it believes to be the update again. So with accumulation
it lands in another epoch at another image, and from the second epoch on its step numbers are too small, and too many
updates follow. The place is known here; the trainer only has to be told, and its arithmetic is looked at first.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FrameType
from typing import Any

__all__ = ["OPTIONS", "InitialStep", "arithmetic_of", "is_known"]

OPTIONS = ("initial_step", "initial_epoch", "skip_until_initial_step")
_NAME = OPTIONS[0]
# What a trainer does with the number, from its first assignment on. Whether it is compared or printed does not matter.
_KNOWN = (
    "= 0", "= .initial_step", "= …", "= steps_from_state", "*= .gradient_accumulation_steps", "_ // …", "_ // …", "= 0",
    "-= …", "global_step = _", "skip_first_batches(_ - 1)", "= 1", "-= 1",
)  # fmt: skip
_COUNTED_DOWN = "… - _"  # updates that are left, for the progress bar: a plain number wherever it stands


class InitialStep(int):
    """Updates that are trained already, which stand in `epoch` (from 0), whatever is computed from them.

    Only what the trainer does to its `initial_step` has another result than with a plain number: times the
    accumulation, less the batches of an epoch, and divided by the updates of one. `max_train_steps - initial_step`
    and what is counted on from here are plain numbers.
    """

    epoch: int

    @classmethod
    def of(cls, update: int, epoch: int) -> InitialStep:
        first = cls(update)
        first.epoch = epoch
        return first

    def __mul__(self, accumulation: Any) -> InitialStep:
        return self

    def __sub__(self, batches: Any) -> InitialStep:
        return self

    def __floordiv__(self, updates_per_epoch: Any) -> int:
        return self.epoch


def is_known(arguments: Any, frame: FrameType | None) -> bool:
    """Whether a trainer computes with its initial step as all known versions do, or has no such number.

    Args:
        arguments: its command line, parsed.
        frame: that of the trainer's function, or of one that it calls.
    """
    options = [hasattr(arguments, name) for name in OPTIONS]
    if not all(options):
        return not any(options)
    while frame is not None:
        if _NAME in frame.f_code.co_varnames or _NAME in frame.f_code.co_cellvars:
            try:
                source = inspect.getsource(frame.f_code)
            except (OSError, TypeError):
                return False
            found = arithmetic_of(source)
            return tuple(step for step in found if step != _COUNTED_DOWN) == _KNOWN
        frame = frame.f_back
    return False


def arithmetic_of(source: str) -> list[str]:
    """What a function does with its `initial_step`, in order: `_` is the number, `…` anything else."""
    tree = ast.parse(textwrap.dedent(source))
    steps: list[tuple[int, int, str]] = []
    for node in ast.walk(tree):
        step = _step(node)
        if step:
            steps.append((node.lineno, node.col_offset, step))  # type: ignore[attr-defined]
    return [step for _, _, step in sorted(steps)]


_SIGNS = {ast.Mult: "*", ast.FloorDiv: "//", ast.Sub: "-", ast.Add: "+", ast.Mod: "%", ast.Div: "/"}


def _step(node: ast.AST) -> str:
    if isinstance(node, ast.Assign) and _is_number(node.targets[0]):
        return f"= {_text(node.value)}"
    if isinstance(node, ast.Assign) and _is_number(node.value):
        return f"{_text(node.targets[0])} = _"
    if isinstance(node, ast.AugAssign) and _is_number(node.target):
        return f"{_SIGNS.get(type(node.op), '?')}= {_text(node.value)}"
    if isinstance(node, ast.AugAssign) and _is_number(node.value):
        return f"{_text(node.target)} {_SIGNS.get(type(node.op), '?')}= _"
    if isinstance(node, ast.Call):
        called = [argument for argument in node.args if isinstance(argument, ast.BinOp) and _is_number(argument.left)]
        if called and isinstance(node.func, ast.Attribute):
            sign = _SIGNS.get(type(called[0].op), "?")
            return f"{node.func.attr}(_ {sign} {_text(called[0].right)})"
    if isinstance(node, ast.BinOp) and _is_number(node.right):
        return f"… {_SIGNS.get(type(node.op), '?')} _"
    if isinstance(node, ast.BinOp) and _is_number(node.left) and not isinstance(node.op, ast.Sub):
        return f"_ {_SIGNS.get(type(node.op), '?')} {_text(node.right)}"
    return ""


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == _NAME


def _text(node: ast.AST) -> str:
    """A constant, a name or an attribute as it stands there; anything else is the trainer's own affair."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else "…"
