"""What a seam is: a place of a trainer, what must be there, and what stands in for it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol

from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.patching import Patches, StandIn
from kohya_bucket.adapter.shapes import Check

__all__ = ["Door", "Owners", "Seam", "Subject", "Unknown"]

_MISSING = object()


class Door(Protocol):
    """What stand-ins ask of the adapter that put them there."""

    owners: Owners
    patches: Patches
    resume: Any

    @property
    def in_worker(self) -> Callable[[], None]:
        """What opens the door in a loader's worker process: a spawned one has imported the trainer afresh."""
        ...

    def options(self) -> AdapterOptions:
        """Those of the config that was read last: it is read after the stand-ins are in place."""
        ...

    def read_options(self, user_config: dict[str, Any]) -> dict[str, Any]:
        """Take the `[kohya_bucket]` table, and return the config without it."""
        ...

    def knows(self, subject: str) -> bool:
        """Whether that subject looks as it should; where not, it is left to the trainer."""
        ...


MakeStandIn = Callable[[Any, Door], Any]


@dataclass(frozen=True)
class Seam:
    """One place.

    Attributes:
        path: a class, function or member of a class, by the name that the trainer gives it.
        checks: what must hold there.
        stand_in: (what is there, door) -> what is put there; None where it is only relied on.
    """

    path: str
    checks: tuple[Check, ...] = ()
    stand_in: MakeStandIn | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Every name of the trainer that this seam relies on."""
        return tuple(dict.fromkeys((*self.path.split("."), *(name for check in self.checks for name in check.names))))


@dataclass(frozen=True)
class Subject:
    """Seams that stand or fall together.

    Attributes:
        name: short, for programs.
        text: what the trainer does itself where this is left to it.
        seams_of: the seams in a checkout, which versions have of several kinds.
        orders_epochs: without it there is no adapter.
    """

    name: str
    text: str
    seams_of: Callable[[Owners], tuple[Seam, ...]]
    orders_epochs: bool = False

    def problems(self, owners: Owners) -> list[str]:
        """What is missing or different, by seam."""
        return [f"{seam.path} {problem}" for seam in self.seams_of(owners) if (problem := owners.problem(seam))]

    def stand_ins(self, owners: Owners, door: Door) -> list[StandIn]:
        """What is to be put in place; call only where there are no problems."""
        out = []
        for seam in self.seams_of(owners):
            if seam.stand_in is not None:
                owner, name, value = owners.find(seam.path)
                out.append(StandIn(owner, name, seam.stand_in(value, door)))
        return out


@dataclass(frozen=True)
class Unknown:
    """A subject that looks different from every version that is known."""

    subject: Subject
    problems: tuple[str, ...]


@dataclass
class Owners:
    """Finds what a trainer defines, wherever a version defines it.

    Args:
        package: the package that holds its code.
        home: its main module, whose names come first where modules disagree.
        foreign: classes of other packages that seams are about, by name.
    """

    package: str
    home: ModuleType
    foreign: dict[str, Any] = field(default_factory=dict)

    def find(self, path: str) -> tuple[Any, str, Any]:
        """(owner, name, value) of a path; the value is `_MISSING` where there is nothing."""
        first, *rest = path.split(".")
        value = self.named(first)
        owner: Any = sys.modules.get(getattr(value, "__module__", ""))
        name = getattr(value, "__name__", first)
        for part in rest:
            if value is _MISSING:
                break
            # as it stands there: a static method is one, and not yet the function
            owner, name, value = value, part, _static(value, part)
        return owner, name, value

    def named(self, name: str) -> Any:
        """A class, function or value that some module of the trainer has."""
        if name in self.foreign:
            return self.foreign[name]
        return next((vars(module)[name] for module in self._modules() if name in vars(module)), _MISSING)

    def has(self, path: str) -> bool:
        """Whether there is such a thing, whatever it looks like."""
        return self.find(path)[2] is not _MISSING

    def problem(self, seam: Seam) -> str:
        """What is wrong at a seam, or an empty text."""
        value = self.find(seam.path)[2]
        if value is _MISSING:
            return "does not exist"
        return ", ".join(filter(None, (check(value) for check in seam.checks)))

    def _modules(self) -> Iterable[ModuleType]:
        """The trainer's modules, its home first."""
        yield self.home
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{self.package}.") and isinstance(module, ModuleType) and module is not self.home:
                yield module


def _static(owner: Any, name: str) -> Any:
    for base in getattr(owner, "__mro__", (owner,)):
        if name in vars(base):
            return vars(base)[name]
    return _MISSING
