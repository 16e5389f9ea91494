"""Seams: places of a trainer's code, what must be there, and what replaces it."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType, MappingProxyType, ModuleType
from typing import Any, NamedTuple, Protocol

from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.patching import Replacement
from kohya_bucket.trainers.door.ranks import exit_with_message
from kohya_bucket.trainers.door.shapes import Behaves, Check, bounds_of_function, by_name, signature_of, takes_all

_MISSING = object()


class Door(Protocol):
    """What replacements ask of a `TrainerDoor`."""

    owners: Owners
    resume: Any

    def options(self) -> AdapterOptions: ...
    def read_options(self, user_config: dict[str, Any], frame: FrameType) -> dict[str, Any]: ...
    def leave(self, subject: SeamGroup, why: str) -> None: ...


class Replaced(NamedTuple):
    """Where a replacement stands, its first argument: what was there, and the door that replaced it."""

    original: Any
    door: Door


@dataclass(frozen=True)
class Seam:
    """One place.

    What a replacement must take follows from its own signature. It is never given what it does not take: parameters
    that only the original has, with a default, are passed on if the replacement ends in `**more`; otherwise a call that
    gives one another value leaves the subject to the trainer. A `KohyaBucketError` in it ends the run with one line.

    Attributes:
        path: a class, function or member of a class, by the name that the trainer gives it.
        checks: what must hold there.
        replacement: a function of a `Replaced` and of the original's arguments; None if the original stays.
        only: all parameters whose values have no consequences that the adapter does not know; none: any.
        defaults: class of the trainer that has defaults of parameters that have none in the signature.
        when: whether a checkout has it, where only some versions do.
    """

    path: str
    checks: tuple[Check, ...] = ()
    replacement: Any = None
    only: tuple[str, ...] = ()
    defaults: str = ""
    when: Callable[[Owners], bool] = lambda _: True

    @property
    def _signature(self) -> inspect.Signature:
        """What the replacement takes of the trainer."""
        signature = inspect.signature(self.replacement or _pass_on)
        return signature.replace(parameters=list(signature.parameters.values())[1:])

    def problem(self, value: Any) -> str:
        """What is wrong with what was found, or an empty text."""
        problems = [bounds_of_function(self._signature, value)] if self.replaces else []
        for check in sorted(self.checks, key=lambda check: isinstance(check, Behaves)):
            if not (isinstance(check, Behaves) and any(problems)):  # what looks otherwise is not called
                problems.append(check(value))
        return ", ".join(filter(None, problems))

    @property
    def replaces(self) -> bool:
        """Whether something else is put there."""
        return self.replacement is not None or bool(self.only)

    def replaced(self, original: Any, door: Door, subject: SeamGroup) -> Any:
        """What is put there."""
        seam, replacement, theirs = Replaced(original, door), self.replacement or _pass_on, signature_of(original)
        adapted = adapt(theirs, self._signature, self.only)

        @functools.wraps(original)
        def stands_in(*args: Any, **kwargs: Any) -> Any:
            call = adapted(args, kwargs)
            # What is strange to the replacement must have its default, or the subject is the trainer's again.
            if problem := self._unheeded(call.strange, theirs, door):
                door.leave(subject, problem)
                return original(*args, **kwargs)
            with exit_with_message():
                made = replacement(seam, *call.args, **call.kwargs)
            return _each(made) if inspect.isgeneratorfunction(replacement) else made

        return stands_in

    def _unheeded(self, arguments: Mapping[str, Any], theirs: inspect.Signature, door: Door) -> str:
        """Which of some arguments has another value than its default, in words."""
        implied = door.owners.named(self.defaults) if self.defaults else None
        for name, value in arguments.items():
            parameter = theirs.parameters.get(name)
            default = getattr(implied, name, parameter.default if parameter else inspect.Parameter.empty)
            if value is not default and (
                type(value) is not type(default) or hasattr(value, "shape") or value != default
            ):
                return f"{self.path} is given {name} = {value!r}, which this adapter does not know"
        return ""


def _each(made: Iterator[Any]) -> Iterator[Any]:
    """What a replacement makes one by one: it runs while that is asked for."""
    with exit_with_message():
        yield from made


def _pass_on(seam: Replaced, *args: Any, **kwargs: Any) -> Any:
    return seam.original(*args, **kwargs)


class _Call(NamedTuple):
    """Arguments as a replacement is given them, and by name those that are strange to it."""

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    strange: Mapping[str, Any] = MappingProxyType({})


def adapt(theirs: inspect.Signature, ours: inspect.Signature, only: Collection[str] = ()) -> Callable[..., _Call]:
    """How the arguments of a function are given to another in its place; parameters of ours by position alone are so.

    | ours takes                       | is given              | strange to it             |
    | -------------------------------- | --------------------- | ------------------------- |
    | all of theirs                    | what comes            | nothing                   |
    | `(a, b)`                         | a and b, by name      | all others                |
    | `(a, b, **more)`, `(*a, **more)` | all; the latter as is | nothing; or beyond `only` |
    """
    ours_by_name, names = by_name(ours, theirs), theirs.parameters
    by_position = [name for name, parameter in ours_by_name.items() if parameter.kind is parameter.POSITIONAL_ONLY]
    understood = {"self", *(only or ours_by_name)}
    # Without a look at the call, since none can hold what is strange.
    if names.keys() <= understood or (takes_all(ours) and not only):
        return _Call
    takes_any = not only and any(parameter.kind is parameter.VAR_KEYWORD for parameter in ours_by_name.values())

    def adapted(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        values = theirs.bind(*args, **kwargs).arguments
        for name in [name for name in values if names[name].kind is inspect.Parameter.VAR_KEYWORD]:
            values |= values.pop(name)
        strange = {name: value for name, value in values.items() if not takes_any and name not in understood}
        if takes_all(ours):
            return _Call(args, kwargs, strange)
        # Defaults are not among the values: the replacement has its own.
        named = {name: value for name, value in values.items() if name not in (*by_position, *strange)}
        return _Call([values[name] for name in by_position], named, strange)

    return adapted


def where(condition: Callable[[Owners], bool], *seams: Seam) -> tuple[Seam, ...]:
    """Seams that only some versions have."""
    return tuple(replace(seam, when=condition) for seam in seams)


def calling_frame() -> FrameType:
    """Of the trainer's code that called the replacement which asks."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


@dataclass(frozen=True)
class SeamGroup:
    """Seams that stand or fall together.

    Attributes:
        name: short, for programs.
        text: what the trainer does itself if this is left to it.
        seams: those of all versions.
        orders_epochs: without it there is no adapter.
    """

    name: str
    text: str
    seams: tuple[Seam, ...]
    orders_epochs: bool = False

    def seams_of(self, owners: Owners) -> tuple[Seam, ...]:
        return tuple(seam for seam in self.seams if seam.when(owners))

    def problems(self, owners: Owners) -> list[str]:
        """What is missing or different, by seam."""
        return [f"{seam.path} {problem}" for seam in self.seams_of(owners) if (problem := owners.problem(seam))]

    def replacements(self, owners: Owners, door: Door) -> list[Replacement]:
        """What is to be put in place; call only where there are no problems."""
        out = []
        for seam in self.seams_of(owners):
            if seam.replaces:
                owner, name, value = owners.find(seam.path)
                out.append(Replacement(owner, name, seam.replaced(value, door, self)))
        return out


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
            owner, name, value = value, part, inspect.getattr_static(value, part, _MISSING)
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
        return "does not exist" if value is _MISSING else seam.problem(value)

    def _modules(self) -> Iterable[ModuleType]:
        """The trainer's modules, its home first."""
        yield self.home
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{self.package}.") and isinstance(module, ModuleType) and module is not self.home:
                yield module
