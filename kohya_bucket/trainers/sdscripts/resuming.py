"""Resuming at the exact image: `--resume`, `--initial_step`, `--initial_epoch`, `--skip_until_initial_step`.

Where an update is asked for by its number, the plan knows the images that an uninterrupted run would train there.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from kohya_bucket.errors import ConfigError
from kohya_bucket.planning.resume import ResumePoint
from kohya_bucket.texts import parse_json, read_text
from kohya_bucket.trainers.door.ranks import is_first_process
from kohya_bucket.trainers.door.resume import NoPlaceError, ResumeHooks
from kohya_bucket.trainers.door.sampler import PlanSampler

logger = logging.getLogger("kohya_bucket")


class TrainerResume(ResumeHooks):
    """A run of one of sd-scripts' trainers, which count updates, and may be told from which to go on."""

    @property
    def initial_step(self) -> type[InitialStep]:
        """What the trainer is given as the number of its first update."""
        return InitialStep

    def __init__(self) -> None:
        super().__init__()
        self.arguments: Any = None
        self._counts = True

    def take_arguments(self, arguments: Any, *, counts: bool) -> None:
        """The trainer's command line, and whether it is known how the trainer counts from its initial step.

        Raises:
            ConfigError: an option that needs that count, where it is not known.
        """
        self.arguments, self._counts = arguments, counts
        asked = [name for name in OPTIONS if self._argument(name)]
        if asked and not counts:
            raise ConfigError(
                f"--{asked[0]} is given, but this trainer computes with its initial step in a way that is not known, "
                "so it would train other images than asked: leave it out (--resume alone continues with the next "
                "image), or update kohya-bucket"
            )

    def attach(self, sampler: PlanSampler) -> None:
        waiting = self._loaded is not None
        super().attach(sampler)
        asked = self._asked()
        if asked and not waiting and not self._argument("resume"):
            self._begin_at(sampler, asked)

    @property
    def accumulation(self) -> int:
        return int(self._argument("gradient_accumulation_steps") or 1)

    def on_resumed(self, sampler: PlanSampler, point: ResumePoint, folder: Path) -> None:
        asked, counted, update = self._asked(), counted_by_trainer(folder), self._update_at(point)
        if asked is None or asked == update:
            other = "" if counted in (None, update) else f" (update {counted} of the saved run, whose updates differ)"
            self._hand_over(point, update, other)
        else:
            self._begin_at(sampler, asked, f" as asked for, though the state was saved after update {update}")

    def on_no_place(self, sampler: PlanSampler, folder: Path, error: NoPlaceError) -> None:
        asked = self._asked()
        if asked is None and self._argument("skip_until_initial_step"):
            asked = counted_by_trainer(folder)
        if asked is None:
            super().on_no_place(sampler, folder, error)
        else:
            self._begin_at(sampler, asked, f" in this run's own order: {error}")

    def _begin_at(self, sampler: PlanSampler, update: int, why: str = "") -> None:
        """Go to where an uninterrupted run with this plan has made so many updates."""
        epoch, updates = divmod(update, self._updates_per_epoch())
        self._hand_over(sampler.begin_at(epoch + 1, updates * self.accumulation), update, why)

    def _hand_over(self, point: ResumePoint, update: int, why: str) -> None:
        """Let the trainer count from `update` on, and not skip again what the sampler leaves out."""
        if is_first_process():
            logger.info(
                "going on after update %d, with batch %d of epoch %d%s", update, point.done + 1, point.epoch, why
            )
        if not hasattr(self.arguments, "initial_step") or not self._counts:
            return  # a trainer that begins to count again, or in its own way
        self.arguments.initial_step = self.initial_step.of(update, point.epoch - 1)
        self.arguments.skip_until_initial_step = True
        self.accelerator.skip_first_batches = self._skip_first_batches

    def _skip_first_batches(self, loader: Any, count: Any = 0) -> Any:
        if self.sampler is None or not isinstance(count, InitialStep):
            return type(self.accelerator).skip_first_batches(self.accelerator, loader, count)
        # The trainer asks for one batch less than it skips, and throws the first one away.
        self.sampler.repeat_first = True
        return loader

    def _asked(self) -> int | None:
        """The updates that the user says are done, if so."""
        step, epoch = self._argument("initial_step"), self._argument("initial_epoch")
        if step is not None:
            return max(int(step), 0)
        return None if epoch is None else max(int(epoch) - 1, 0) * self._updates_per_epoch()

    def _update_at(self, point: ResumePoint) -> int:
        """Updates before a point: whole epochs of them, less those that the point's epoch still holds."""
        per_epoch, left = self._updates_per_epoch(), -(-point.left // self.accumulation)
        return point.epoch * per_epoch - min(left, per_epoch)

    def _argument(self, name: str) -> Any:
        return getattr(self.arguments, name, None)

    def _updates_per_epoch(self) -> int:
        assert self.sampler is not None
        return -(-(len(self.sampler) // self.sampler.world_size) // self.accumulation)


# `--initial_step`, as a number that comes through `train_network.py`'s arithmetic as it is.
#
# The trainer multiplies the number of the first update by the accumulation, divides that by updates to get the first
# epoch, and takes whole epochs of batches off it, whose rest it believes to be the update again. So with accumulation
# it lands in another epoch at another image, and from the second epoch on its step numbers are too small, and too many
# updates follow. The place is known here; the trainer only has to be told, and its arithmetic is looked at first.


OPTIONS = ("initial_step", "initial_epoch", "skip_until_initial_step")
_NAME = OPTIONS[0]
# What a trainer does with the number, from its first assignment on. Whether it is compared or printed does not matter.
_KNOWN = (
    "= 0", "= .initial_step", "= …", "= steps_from_state", "*= .gradient_accumulation_steps", "_ // …", "_ // …", "= 0",
    "-= …", "global_step = _", "skip_first_batches(_ - 1)", "= 1", "-= 1",
)  # fmt: skip
_COUNTED_DOWN = "… - _"  # updates that are left, for the progress bar: a plain number wherever it stands


class InitialStep(int):
    """Updates that are trained already, which lie in `epoch` (from 0), whatever is computed from them.

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
    return tuple(step for step in arithmetic_above(frame) if step != _COUNTED_DOWN) == _KNOWN


def arithmetic_above(frame: FrameType | None) -> list[str]:
    """What the innermost function that has an `initial_step` does with it, from that of `frame` outwards."""
    while frame is not None and _NAME not in (*frame.f_code.co_varnames, *frame.f_code.co_cellvars):
        frame = frame.f_back
    return [] if frame is None else arithmetic_of(source_of(frame.f_code))


def source_of(function: Any) -> str:
    """The source of a function, or of its code; empty where there is none."""
    with suppress(OSError, TypeError):
        return inspect.getsource(function)
    return ""


def arithmetic_of(source: str) -> list[str]:
    """What a function does with its `initial_step`, in order: `_` is the number, `…` anything else."""
    nodes: Any = ast.walk(ast.parse(textwrap.dedent(source)))
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
    return {_NAME: "_", "_": "…"}.get(node.id, node.id) if isinstance(node, ast.Name) else "…"


_TRAIN_STATE = "train_state.json"  # where train_network.py remembers its update count


def counted_by_trainer(folder: Path) -> int | None:
    """The updates that `train_network.py` itself had counted; None for a state of another trainer."""
    file = folder / _TRAIN_STATE
    counted = parse_json(read_text(file)).get("current_step") if file.is_file() else None
    return None if counted is None else int(counted)
