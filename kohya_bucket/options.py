"""How an option is declared: once, with its default, what a value must be, and what it needs to have an effect.

`RuleOptions`, `EpochOptions`, `PlanOptions` and `AdapterOptions` are made of these fields. Python's arguments, the
`[kohya_bucket]` table and the command line check and explain them by what is declared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields
from typing import Any

from kohya_bucket.checks import Check, one_of, refuse_other
from kohya_bucket.errors import KohyaBucketError


def option(default: Any, check: Check, read: Callable[[Any], Any] = lambda value: value, **about: Any) -> Any:
    """A field that refuses what `check` says something about, and keeps what `read` makes of the value.

    `about` may hold `needs`, a pair: whether the option has an effect, given all options, and without what it has none.
    """
    return field(default=default, metadata={"check": check, "read": read, **about})


def choice(default: str | None, known: Callable[[], Iterable[str]], **about: Any) -> Any:
    """A field that is one of some names; those that are registered later than this is read are found too."""
    return field(default=default, metadata={"known": known, "read": lambda value: value, **about})


def read_value(about: Mapping[str, Any], name: str, value: Any, error: type[KohyaBucketError]) -> Any:
    """The value of an option as it is used, by its field's metadata.

    Raises:
        KohyaBucketError: it is not allowed, of the type given, with what is.
    """
    if "known" in about:
        one_of(name, value, about["known"](), error)
    else:
        refuse_other(name, value, about["check"], error)
    return about["read"](value)


def without_effect(options: Any) -> Iterator[str]:
    """One text for each option that is not at its default and changes nothing; it begins with the option's name."""
    for one in fields(options):
        has_effect, needed = one.metadata.get("needs", (None, ""))
        value = getattr(options, one.name)
        if has_effect is not None and value != one.default and not has_effect(options):
            yield f"{one.name} is {value!r}, which has no effect without {needed}: set that, or leave {one.name} out"


def is_number(value: Any) -> bool:
    """Whether it is an int or a float; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_weight(value: Any) -> bool:
    """Whether it is a finite number from 0 on."""
    return is_number(value) and 0 <= value < math.inf


def share(value: Any) -> str:
    """A share of an image, below 1."""
    return "" if is_number(value) and 0 <= value < 1 else "a share of the image from 0 to less than 1, e.g. 0.05 for 5%"


def weights(value: Any) -> str:
    """A list of weights that are not all 0."""
    numbers = value.tolist() if hasattr(value, "tolist") else value if isinstance(value, (list, tuple)) else []
    good = len(numbers) > 0 and all(map(is_weight, numbers)) and sum(numbers) > 0
    return "" if good else "a list of numbers, 0 or more and not all 0, e.g. [3, 1]"
