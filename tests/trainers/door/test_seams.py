"""What a replacement is given of a trainer's call, whatever parameters the trainer's function has."""

import inspect
import random
import types

import pytest

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.trainers.door.seams import Owners, Seam, SeamGroup

KNOWN = ("alpha", "beta")


class Door:
    """Notes what is left to the trainer."""

    def __init__(self, **named):
        self.left = []
        self.owners = Owners("pedal", types.SimpleNamespace(__name__="pedal", **named))

    def leave(self, subject, why):
        self.left.append((subject.name, why))


def heard(seam, self, alpha, beta=2):
    return "replaced", {"alpha": alpha, "beta": beta}


def forwards(seam, self, alpha, beta=2, **more):
    return "replaced", seam.original(self, alpha, beta, **more)


def anything(seam, self, *args, **kwargs):
    return "replaced", seam.original(self, *args, **kwargs)


def function_of(parameters):
    """A trainer's function, which returns what it is given."""
    spelled = ", ".join(f"{name}={default!r}" if default is not None else name for name, default in parameters)
    names = ", ".join(f"{name!r}: {name}" for name, _ in parameters)
    space = {}
    exec(f"def trains(self, {spelled}): return {{{names}}}", space)
    return space["trains"]


def replaced(seam, original, door):
    assert seam.problem(original) == ""
    return seam.replaced(original, door, SeamGroup("placing", "places itself", (seam,)))


def calls(draw, parameters):
    """(arguments, keys, what is given by name) of a legal call."""
    given = [(name, draw.randrange(10)) for name, default in parameters if default is None or draw.random() < 0.7]
    whole = 0
    while whole < len(given) and given[whole][0] == parameters[whole][0]:
        whole += 1
    whole = draw.randint(0, whole)
    return [value for _, value in given[:whole]], dict(given[whole:]), dict(given)


@pytest.mark.parametrize("seed", range(200))
def test_no_argument_is_lost_or_ends_in_an_error(seed):
    draw = random.Random(seed)
    more = [(f"more{i}", draw.randrange(3)) for i in range(draw.randrange(3))]
    parameters = [("alpha", None), ("beta", 2), *more]
    original = function_of(parameters)
    door = Door()
    args, keys, given = calls(draw, parameters)
    everything = {**{name: default for name, default in parameters if default is not None}, **given}
    unknown = [name for name, default in more if name in given and given[name] != default]

    said = replaced(Seam("Wheel.turn", (), heard), original, door)(None, *args, **keys)
    if unknown:  # the trainer does it itself, and which argument is to blame is said
        assert said == everything
        problem = f"{unknown[0]} = {given[unknown[0]]!r}, which this adapter does not know"
        assert door.left == [("placing", f"Wheel.turn is given {problem}")]
    else:
        assert said == ("replaced", {name: everything[name] for name in KNOWN})
        assert door.left == []
    for passing in (forwards, anything):
        quiet = Door()
        assert replaced(Seam("Wheel.turn", (), passing), original, quiet)(None, *args, **keys) == (
            "replaced",
            everything,
        )
        assert quiet.left == []


@pytest.mark.parametrize("seed", range(50))
def test_parameters_can_be_forbidden_whatever_the_replacement_takes(seed):
    draw = random.Random(seed)
    parameters = [("alpha", None), ("gamma", None), ("beta", 2)]  # gamma has its default elsewhere
    original = function_of(parameters)
    door = Door(WheelParams=types.SimpleNamespace(gamma=1))
    args, keys, given = calls(draw, parameters)
    for passing in (None, anything):
        door.left.clear()
        seam = Seam("Wheel.turn", (), passing, only=KNOWN, defaults="WheelParams")
        said = replaced(seam, original, door)(None, *args, **keys)
        assert (said if isinstance(said, dict) else said[1]) == {"beta": 2, **given}
        assert bool(door.left) == (given["gamma"] != 1)


def takes(parameters):
    return eval(f"lambda {parameters}: None")


@pytest.mark.parametrize(
    ("replacement", "theirs", "problem"),
    [
        (heard, takes("self, alpha"), ""),
        (heard, takes("self, beta"), "does not take alpha"),
        (heard, takes("self, beta, alpha"), "takes (self, beta, alpha), expected (self, alpha, beta, …)"),
        (heard, takes("self, alpha, beta, gamma"), "takes gamma too"),
        (heard, takes("self, alpha, beta, gamma=0"), ""),
        (heard, takes("self, *args, **kwargs"), "does not take alpha"),
        (heard, 5, "is not a function of its own"),
        (forwards, takes("self, alpha, beta, gamma"), ""),
        (anything, takes("*args"), "does not take self"),
    ],
)
def test_what_a_replacement_cannot_take_is_a_problem(replacement, theirs, problem):
    assert Seam("Wheel.turn", (), replacement).problem(theirs) == problem


def test_a_function_is_wrapped_as_itself():
    def turn(self, alpha, gamma=1):
        """Turns."""

    made = replaced(Seam("Wheel.turn", (), heard), turn, Door())
    assert (made.__name__, made.__doc__) == ("turn", "Turns.")
    assert inspect.signature(made) == inspect.signature(turn)


def test_what_is_made_one_by_one_ends_the_run_as_all_else_does(capsys):
    def numbers(seam, self, alpha):
        yield from seam.original(self, alpha)
        raise KohyaBucketError("the folder does not answer")

    def original(self, alpha):
        yield from range(alpha)

    door = Door()
    made = replaced(Seam("Wheel.turn", (), numbers), original, door)(None, 2)
    assert [next(made), next(made)] == [0, 1]
    with pytest.raises(SystemExit, match=r"^kohya_bucket: the folder does not answer$") as ended:
        next(made)
    assert ended.value.code == 2
    assert "the folder does not answer" in capsys.readouterr().err
