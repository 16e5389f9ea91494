"""Checks on a trainer's classes and functions: each names what is wrong, and insists on the names that it says."""

import importlib
from typing import NamedTuple, Protocol

import pytest

from kohya_bucket.trainers.door.shapes import (
    Behaves,
    Fields,
    Inherits,
    Offers,
    Says,
    Takes,
    TakesAmong,
    Uses,
    attributes_of,
)


class Base:
    kind = "base"

    def walk(self, step, *, fast=False):
        self.pace = step
        self.kind = fast

    def climb(self, fast, why, *rest, how=1, **more):
        self.kind = fast, why, rest, how, more

    @classmethod
    def made(cls, size):
        return cls, size

    @property
    def far(self):
        return {"metres": self.pace, ("a", "deep"): lambda: self.kind}


class Child(Base):
    def walk(self, step, *, fast=False):
        self.trace = lambda: self.steps

    def run(self):
        pass


class Step(NamedTuple):
    left: int
    right: int


class LatentItems(Protocol):
    pace: int
    trace: int

    @property
    def far(self) -> int: ...

    def run(self) -> None: ...


@pytest.mark.parametrize(
    ("check", "found", "problem"),
    [
        (Takes("step", "fast"), Base.walk, ""),
        (Takes("step"), Base.walk, "takes (step, fast), expected (step)"),
        (Takes("cls", "size"), vars(Base)["made"], ""),
        (Takes("step"), 5, "is not a function of its own"),
        (TakesAmong("step"), Base.walk, ""),
        (TakesAmong("slow", "fast"), Base.walk, "does not take slow"),
        (TakesAmong("fast"), Base.climb, "takes why too"),
        (Uses("pace", "kind"), Base.walk, ""),
        (Uses("steps"), Child.walk, ""),  # in a function within it
        (Uses("pace"), Child.walk, "does not use pace"),
        (Uses("pace"), len, "is not a function of its own"),
        (Says("metres"), Base.far.fget, ""),
        (Says("deep"), Base.far.fget, ""),
        (Says("miles"), Base.far.fget, "has no text miles"),
        (Fields("left", "right"), Step, ""),
        (Fields("left"), Step, "has the fields ('left', 'right'), expected ('left',)"),
        (Inherits("made"), Child, ""),
        (Inherits("walk"), Child, "has a walk of its own"),
        (Inherits("fly"), Child, "has no fly"),
        (Offers(LatentItems), Child, ""),
        (Offers(LatentItems), Base, "has no run, trace"),
        (Offers(LatentItems), Child(), "is not a class"),
        (Behaves(lambda _: [((3, 4), divmod(7, 2), (3, 1))]), Base.walk, ""),
        (Behaves(lambda _: [("7 by 2", divmod(7, 2), (3, 2))]), Base.walk, "makes (3, 1) of 7 by 2, expected (3, 2)"),
        (Behaves(lambda _: [1 / 0]), Base.walk, "cannot be tried: ZeroDivisionError: division by zero"),
        (Behaves(lambda _: importlib.import_module("no_such_module")), Base.walk, ""),
    ],
)
def test_each_says_what_is_wrong(check, found, problem):
    assert check(found) == problem


def test_each_tells_the_names_it_insists_on():
    assert Takes("step", "fast").names == ("step", "fast")
    assert Offers(LatentItems).names == ("far", "pace", "run", "trace")
    assert {"kind", "pace", "walk", "made", "far"} <= attributes_of(Base)
