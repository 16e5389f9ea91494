"""What a place in a trainer's code must look like, and do, before anything is put there.

A check is called with what was found, and returns what is wrong with it, or an empty text. `names` are the names that
it insists on, so that a test can rename each of them and see the check fail.
"""

from __future__ import annotations

import dis
import inspect
import zlib
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kohya_bucket.images.resize import resampler


class Check:
    """A condition on a function or class; `names` are those that must be there."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __call__(self, found: Any) -> str:
        """What is wrong, or an empty text."""
        try:
            return self.problem(found)
        except (AttributeError, TypeError, ValueError):
            return "is not a function of its own"

    def problem(self, found: Any) -> str:
        """The same, of what it is about; it may raise for anything else."""
        raise NotImplementedError


class Takes(Check):
    """A function with these parameters after `self`, in this order, and no others."""

    def problem(self, found: Any) -> str:
        names = [name for name in signature_of(found).parameters if name not in _SELF]
        return "" if names == list(self.names) else f"takes ({', '.join(names)}), expected ({', '.join(self.names)})"


class TakesAmong(Check):
    """A function with these parameters, which can be called with no others."""

    def problem(self, found: Any) -> str:
        parameters = signature_of(found).parameters
        if missing := set(self.names) - set(parameters):
            return f"does not take {', '.join(sorted(missing))}"
        more = [name for name in parameters if name not in (*self.names, *_SELF) and _is_required(parameters[name])]
        return f"takes {', '.join(more)} too" if more else ""


class Uses(Check):
    """A function whose own code, functions within it included, reads or writes these names."""

    lacks = "does not use"

    def problem(self, found: Any) -> str:
        missing = set(self.names) - {name for part in _codes(found.__code__) for name in self.in_code(part)}
        return f"{self.lacks} {', '.join(sorted(missing))}" if missing else ""

    def in_code(self, code: CodeType) -> Iterable[str]:
        return code.co_names


class Says(Uses):
    """A function in whose own code these texts stand, as keys of what it returns do."""

    lacks = "has no text"

    def in_code(self, code: CodeType) -> Iterable[str]:
        return _texts(code.co_consts)


class Fields(Check):
    """A named tuple with these fields."""

    def problem(self, found: Any) -> str:
        fields = getattr(found, "_fields", ())
        return "" if fields == self.names else f"has the fields {fields}, expected {self.names}"


class Inherits(Check):
    """A class that has these methods from its bases, and none of its own."""

    def problem(self, found: Any) -> str:
        if redefined := [name for name in self.names if name in vars(found)]:
            return f"has a {redefined[0]} of its own"
        missing = [name for name in self.names if not hasattr(found, name)]
        return f"has no {', '.join(missing)}" if missing else ""


class Offers(Check):
    """A class whose objects have what a protocol names: the one that the adapter's own code is typed with."""

    def __init__(self, protocol: type) -> None:
        super().__init__(*sorted(_members(protocol)))

    def problem(self, found: Any) -> str:
        if not inspect.isclass(found):
            return "is not a class"
        missing = set(self.names) - attributes_of(found)
        return f"has no {', '.join(sorted(missing))}" if missing else ""


class Behaves(Check):
    """A function or class that does for some examples what the adapter does in its place.

    Args:
        examples: (what was found) -> (example, what it answers, what is expected) of each; `ImportError` where they
            cannot be tried.
    """

    def __init__(self, examples: Callable[[Any], Iterable[tuple[Any, ...]]]) -> None:
        super().__init__()
        self.examples = examples

    def __call__(self, found: Any) -> str:
        try:
            for example, answer, expected in self.examples(found):
                if answer != expected:
                    return f"makes {answer} of {example}, expected {expected}"
        except ImportError:
            return ""
        except Exception as error:
            return f"cannot be tried: {type(error).__name__}: {error}"
        return ""


def sample_picture() -> npt.NDArray[np.uint8]:
    """[40, 60, 3] noise, to try a trainer's resizing with; `ImportError` without OpenCV, its filters being others."""
    if resampler("bilinear") != "cv2":
        raise ImportError("cv2")
    return np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)


def checksum(picture: Any) -> str:
    """What `Behaves` shows of a picture."""
    return f"pixels with the checksum {zlib.crc32(np.ascontiguousarray(picture).tobytes()):08x}"


def bounds_of_function(ours: inspect.Signature, theirs: Any) -> str:
    """What keeps a function from taking the place of another: arguments that one of them lacks.

    Those that only theirs can have, with a default, do not matter: they show when they are given.
    """
    try:
        signature = signature_of(theirs)
    except (TypeError, ValueError):
        return "is not a function of its own"
    parameters, expected = signature.parameters, by_name(ours, signature)
    named = [name for name, parameter in expected.items() if parameter.kind not in _VARIADIC]
    # What ours cannot do without.
    if missing := [name for name in named if name not in parameters and _is_required(expected[name])]:
        return f"does not take {', '.join(missing)}"
    # What both have must come in one order, since callers may give it by position.
    both = [name for name in named if name in parameters]
    ordered = [name for name in both if expected[name].kind is not expected[name].KEYWORD_ONLY]
    # Ours that takes everything needs only these in place.
    if takes_all(ours) and list(parameters)[: len(ordered)] == ordered:
        return ""
    if list(parameters)[: len(both)] != both or any(
        parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values()
    ):
        return f"takes ({', '.join(parameters)}), expected ({', '.join(both)}, …)"
    # What theirs cannot do without, unless ours passes on whatever comes.
    passes_on = len(named) < len(expected)
    more = [name for name in parameters if not passes_on and name not in named and _is_required(parameters[name])]
    return f"takes {', '.join(more)} too" if more else ""


def by_name(ours: inspect.Signature, theirs: inspect.Signature) -> dict[str, inspect.Parameter]:
    """Our parameters by the names of theirs: those that are given by position alone may have other names."""
    names = list(theirs.parameters)
    numbered = enumerate(ours.parameters.items())
    return {
        names[i] if parameter.kind is parameter.POSITIONAL_ONLY and i < len(names) else name: parameter
        for i, (name, parameter) in numbered
    }


_SELF = ("self",)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def takes_all(signature: inspect.Signature) -> bool:
    """Whether a function takes any arguments whatsoever."""
    return {parameter.kind for parameter in signature.parameters.values()} >= set(_VARIADIC)


def signature_of(function: Any) -> inspect.Signature:
    """Of a function as it stands in a class. `TypeError` or `ValueError` if it is not a function."""
    return inspect.signature(getattr(function, "__func__", function))


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in _VARIADIC


def attributes_of(cls: type) -> set[str]:
    """What an object of a class has: names in the class and its bases, and what their methods store in objects."""
    names: set[str] = set()
    for base in cls.__mro__[:-1]:
        names |= set(vars(base)) | set(vars(base).get("__annotations__", ()))
        for member in vars(base).values():
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            code = getattr(member, "__code__", None)
            if isinstance(code, CodeType):
                steps = (step for part in _codes(code) for step in dis.get_instructions(part))
                names |= {step.argval for step in steps if step.opname == "STORE_ATTR"}
    return names


def _texts(constant: Any) -> Iterator[str]:
    """Those in a constant, and in the tuples that it holds."""
    if isinstance(constant, str):
        yield constant
    for part in constant if isinstance(constant, tuple) else ():
        yield from _texts(part)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


_OF_EVERY_PROTOCOL = frozenset({*vars(Protocol), *vars(type("_Empty", (Protocol,), {}))})


def _members(protocol: type) -> set[str]:
    """The attributes and methods that a protocol and its bases declare."""
    bases = [vars(base) for base in protocol.__mro__ if base is not Protocol and getattr(base, "_is_protocol", False)]
    members = {name for base in bases for name in (*base, *base.get("__annotations__", ()))}
    return {name for name in members - _OF_EVERY_PROTOCOL if not name.startswith(("_abc", "__"))}
