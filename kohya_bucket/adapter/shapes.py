"""What a place in a trainer's code must look like before anything is put there.

A check is called with what was found, and returns what is wrong with it, or an empty text. `names` are the names that
it insists on, so that a test can rename each of them and see the check fail.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

__all__ = [
    "Check",
    "CoveredBy",
    "Fields",
    "Inherits",
    "Offers",
    "Takes",
    "TakesAmong",
    "Uses",
    "attributes_of",
    "parameters_of",
]


class Check(Protocol):
    """A condition on a function or class."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that must be there."""
        ...

    def __call__(self, found: Any) -> str:
        """What is wrong, or an empty text."""
        ...


@dataclass(frozen=True, init=False)
class _Named:
    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)


class Takes(_Named):
    """A function with these parameters after `self`, in this order, and no others."""

    def __call__(self, found: Any) -> str:
        try:
            taken = parameters_of(found)
        except (TypeError, ValueError):
            return "is not a function of its own"
        if taken == list(self.names):
            return ""
        return f"takes ({', '.join(taken)}), expected ({', '.join(self.names)})"


class TakesAmong(_Named):
    """A function with these parameters among others."""

    def __call__(self, found: Any) -> str:
        try:
            missing = set(self.names) - set(parameters_of(found))
        except (TypeError, ValueError):
            return "is not a function of its own"
        return f"does not take {', '.join(sorted(missing))}" if missing else ""


class Uses(_Named):
    """A function whose own code, functions within it included, reads or writes these names."""

    def __call__(self, found: Any) -> str:
        code = getattr(found, "__code__", None)
        if code is None:
            return "is not a function of its own"
        used = {name for part in _codes(code) for name in part.co_names}
        missing = set(self.names) - used
        return f"does not use {', '.join(sorted(missing))}" if missing else ""


class Says(_Named):
    """A function in whose own code these texts stand, as keys of what it returns do."""

    def __call__(self, found: Any) -> str:
        code = getattr(found, "__code__", None)
        if code is None:
            return "is not a function of its own"
        said = {constant for part in _codes(code) for constant in _texts(part.co_consts)}
        missing = set(self.names) - said
        return f"has no {', '.join(map(repr, sorted(missing)))}" if missing else ""


class Fields(_Named):
    """A named tuple with these fields."""

    def __call__(self, found: Any) -> str:
        fields = getattr(found, "_fields", ())
        return "" if fields == self.names else f"has the fields {fields}, expected {self.names}"


class Inherits(_Named):
    """A class that has these methods from its bases, and none of its own."""

    def __call__(self, found: Any) -> str:
        own = [name for name in self.names if name in vars(found)]
        if own:
            return f"has a {own[0]} of its own"
        missing = [name for name in self.names if not hasattr(found, name)]
        return f"has no {', '.join(missing)}" if missing else ""


@dataclass(frozen=True)
class Offers:
    """A class whose objects have what a protocol names.

    Args:
        protocol: the one that the adapter's own code is typed with.
    """

    protocol: type

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(_members(self.protocol)))

    def __call__(self, found: Any) -> str:
        if not inspect.isclass(found):
            return "is not a class"
        missing = set(self.names) - attributes_of(found)
        return f"has no {', '.join(sorted(missing))}" if missing else ""


@dataclass(frozen=True)
class CoveredBy:
    """A class whose objects have nothing that those of `ours`, which takes its place, lack."""

    ours: type

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    def __call__(self, found: Any) -> str:
        if not inspect.isclass(found):
            return "is not a class"
        more = {name for name in attributes_of(found) - attributes_of(self.ours) if not name.startswith("__")}
        return f"has {', '.join(sorted(more))} too" if more else ""


def parameters_of(function: Any) -> list[str]:
    """Names of a function's parameters, `self` left out. `TypeError` or `ValueError` for what is none."""
    function = getattr(function, "__func__", function)
    return [name for name in inspect.signature(function).parameters if name != "self"]


def attributes_of(cls: type) -> set[str]:
    """What an object of a class has: names in the class and its bases, and what their methods store in objects."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        names |= set(vars(base)) | set(vars(base).get("__annotations__", ()))
        for member in vars(base).values():
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            code = getattr(member, "__code__", None)
            if isinstance(code, CodeType):
                names |= {i.argval for part in _codes(code) for i in dis.get_instructions(part) if i.opname == _STORE}
    return names


_STORE = "STORE_ATTR"


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from _texts(constant)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


_OF_EVERY_PROTOCOL = frozenset({*vars(Protocol), *vars(type("_Empty", (Protocol,), {}))})


def _members(protocol: type) -> set[str]:
    """The attributes and methods that a protocol and its bases declare."""
    members: set[str] = set()
    for base in protocol.__mro__[:-1]:
        if getattr(base, "_is_protocol", False) and base is not Protocol:
            members |= {name for name in vars(base) if name not in _OF_EVERY_PROTOCOL}
            members |= set(vars(base).get("__annotations__", ()))
    return {name for name in members if not name.startswith(("_abc", "__"))}
