"""Values as settings may hold them, checked by kind; and digests, by which equal ones are known."""

from __future__ import annotations

import difflib
import glob
import hashlib
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.errors import KohyaBucketError, PlanError

if TYPE_CHECKING:
    import numpy.typing as npt


Check = Callable[[Any], str]
"""What a value must be, or an empty string where it is that."""


def flag(value: Any) -> str:
    """True or False, numpy's too, or 1 and 0. A text such as "no" would count as true."""
    is_flag = type(value).__name__ in ("bool", "bool_") or (isinstance(value, int) and value in (0, 1))
    return "" if is_flag else "True or False"


def whole_number(least: int, bits: int = 63) -> Check:
    """Any integer type's numbers from `least` on, below 2 ** `bits`."""

    def check(value: Any) -> str:
        try:
            number = least - 1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = least - 1
        if number < least:
            return f"a whole number, {least} or more"
        return "" if number < 1 << bits else f"less than {1 << bits:,}"

    return check


def refuse_other(name: str, value: Any, check: Check, error: type[KohyaBucketError]) -> None:
    """Raises `error` where `value` is not what `check` says that it must be."""
    if must := check(value):
        raise error(f"{name} is {value!r}, but must be {must}")


def as_flag(name: str, value: Any, error: type[KohyaBucketError] = KohyaBucketError) -> bool:
    """A setting that is on or off, as a plain bool; `error` for what is not a `flag`."""
    refuse_other(name, value, flag, error)
    return bool(value)


def integer(name: str, value: Any) -> int:
    """`value` as a plain int, whatever integer type it has.

    Raises:
        PlanError: it is something else: a fraction, a text, None.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise PlanError(f"{name} is {value!r}, but must be a whole number") from None


def array_of(name: str, value: Any, error: type[KohyaBucketError] = PlanError, dtype: Any = None) -> npt.NDArray[Any]:
    """`value` as an array, whatever shape it has.

    Raises:
        KohyaBucketError: it is not one, of the type given: rows of different lengths, or what `dtype` cannot hold.
    """
    import numpy as np  # not for those who only want the help texts

    if (kind := opened_by_numpy(value)) is not None:
        raise error(f"{name} holds {kind.__name__}, but must be an array of numbers, in rows of one length")
    try:
        return np.asarray(value, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        raise error(f"{name} is {str(value)[:100]}, but must be an array of numbers, in rows of one length") from None


def opened_by_numpy(value: Any) -> type | None:
    """The type of what is in a list, or in its rows, and would be read item by item: a dataset of images, say."""
    kinds = set(map(type, value)) if isinstance(value, (list, tuple)) else set()
    if kinds & {list, tuple}:
        kinds |= {type(one) for row in value if isinstance(row, (list, tuple)) for one in row}
    plain = (list, tuple, range, str, bytes)
    foreign = (kind for kind in kinds if not issubclass(kind, plain) and not hasattr(kind, "__array__"))
    return next((kind for kind in foreign if hasattr(kind, "__getitem__")), None)


def whole(name: str, value: Any, low: int, bits: int = 63) -> int:
    """`value` as an int, `low` or more, that fits into so many bits; `PlanError` for anything else."""
    refuse_other(name, value, whole_number(low, bits), PlanError)
    return operator.index(value)


def number_of_launch(name: str, alone: int, allowed: range) -> int:
    """What torchrun or accelerate tell a process in its environment; `alone` where it was started by itself.

    Raises:
        KohyaBucketError: it is not a number, or not one that is allowed.
    """
    text = os.environ.get(name, "") or str(alone)
    try:
        number = int(text)
    except ValueError:
        number = -1
    if number not in allowed:
        must = f"must be a whole number from {allowed.start} to {allowed.stop - 1}, as torchrun and accelerate set it"
        raise KohyaBucketError(f"{name} is {text!r} in the environment, but {must}: unset it to run alone")
    return number


def is_first_process() -> bool:
    """Whether this is rank 0, the process that speaks (the launchers say so in the environment)."""
    return os.environ.get("RANK", "") in ("", "0")  # set to nothing, it counts as not set, as for all who read it


def nearest(name: str, names: Iterable[str]) -> str:
    """The one of the known names that is spelled most like `name`."""
    return difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.0)[0]


def near_text(name: Any, names: Iterable[str]) -> str:
    """A last clause with the known name that may have been meant; empty where none resembles `name`."""
    near = difflib.get_close_matches(name, sorted(names), n=1) if isinstance(name, str) else []
    return f"; the nearest is {near[0]!r}" if near else ""


def digest(*parts: Any, size: int = 8) -> str:
    """BLAKE2b of texts, as UTF-8, and bytes one after another: `size` bytes in hexadecimal digits."""
    state = hashlib.blake2b(digest_size=size)
    for part in parts:
        state.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
    return state.hexdigest()


def path_meant(path: str | os.PathLike[str], endings: Collection[str] = ()) -> str:
    """What to do about a path that leads nowhere: the file or folder that may have been meant, if one resembles it.

    Args:
        endings: of the files that count, in lower case; by default all files and folders.
    """
    if of_windows := _of_windows(os.fspath(path)):
        return of_windows
    named = Path(path)
    first_wrong = next((one for one in (named, *named.parents) if os.path.isdir(one.parent)), named)  # noqa: PTH112  (a NUL)

    def counts(one: Path) -> bool:
        return one.is_dir() if first_wrong != named else not endings or one.suffix.lower() in endings

    try:
        if named.exists():  # and is something else than was wanted
            return "correct the path"
        by_stem = {one.stem.lower(): one for one in first_wrong.parent.iterdir() if counts(one)}
        near = [by_stem[stem] for stem in difflib.get_close_matches(first_wrong.stem.lower(), by_stem, 1)]
        plain = _as_pasted(os.fspath(path))
        meant = next(iter([*plain, *near, *first_wrong.parent.glob(f"*/{glob.escape(first_wrong.name)}")]), None)
    except (OSError, ValueError):
        return "correct the path"
    return f"did you mean {quoted(meant)}?" if meant else "correct the path"


def _of_windows(text: str) -> str:
    """What to do about a Windows path on another system; empty for any other path."""
    parts = re.fullmatch(r"([A-Za-z]:(?=[\\/]))?([^%]*)", text.strip("\"' "))
    if os.name == "nt" or parts is None or not (parts[1] or "\\" in parts[2]) or not text.isprintable():
        return ""
    here = parts[2].replace("\\", "/")
    mounted = f"/mnt/{parts[1][0].lower()}{here}" if parts[1] else here  # as WSL does it
    if os.path.exists(mounted):  # noqa: PTH110
        return f"did you mean {quoted(mounted)}?"
    return (
        "this is a Windows path, and this system uses forward slashes and no drive letters: give the folder as it is "
        "called here; WSL has C: as /mnt/c, and a container has what is mounted into it"
    )


def quoted(path: object) -> str:
    """A path in quotes, with the backslashes that it has; what cannot be printed is escaped."""
    return repr(str(path)).replace("\\\\", "\\")


def _as_pasted(text: str) -> list[Path]:
    """A path without the quotes around it, and with `%USERPROFILE%` and the like filled in, if that is there."""
    plain = re.sub(r"%(\w+)%", lambda name: os.environ.get(name[1], name[0]), text.strip("\"' "))
    return [Path(plain)] if plain not in ("", text) and os.path.exists(plain) else []  # noqa: PTH110  (a NUL)


def one_of(name: str, value: Any, choices: Iterable[str], error: type[KohyaBucketError] = PlanError) -> str:
    """`value`, which is one of the known names of a choice.

    Raises:
        KohyaBucketError: it is not, of the type given, with the nearest name and all of them.
    """
    names = list(choices)
    if isinstance(value, str) and value in names:
        return value
    raise error(f"{name} is {value!r}, but must be one of {', '.join(names)}{near_text(value, names)}")


def known_keyword(where: str, arguments: Iterable[str], known: Iterable[str]) -> None:
    """Raises `TypeError` for an unknown argument, with the nearest known one, as Python itself does for a call."""
    names = set(known)
    for name in arguments:
        if name not in names:
            raise TypeError(f"{where} has no argument {name!r}; the nearest is {nearest(name, names)!r}")


LOADER_OPTIONS = {"num_workers": "max_data_loader_n_workers", "persistent_workers": "persistent_data_loader_workers"}
"""What trainers call arguments of a `DataLoader`, where they do not have names of their own."""


def loader_mistake(given: Mapping[str, Any], names: Mapping[str, str]) -> tuple[str, str] | None:
    """What is wrong and what to do, where PyTorch refuses these arguments of a `DataLoader` or stops with them.

    `names` are those that a trainer has for them; others are called as PyTorch does.
    """
    called = {name: names.get(name, name) for name in ("num_workers", "persistent_workers", "prefetch_factor")}
    workers, ahead = given.get("num_workers", 0), given.get("prefetch_factor")
    if not isinstance(workers, int) or workers < 0:
        return (
            f"{called['num_workers']} is {workers!r}, but must be a whole number of 0 or more",
            "0 loads without workers",
        )
    if given.get("persistent_workers") and not workers:
        remedy = f"leave {called['persistent_workers']} out, or set {called['num_workers']} to 1 or more"
        return f"{called['persistent_workers']} keeps workers, and {called['num_workers']} is 0", remedy
    if ahead is not None and not workers:
        remedy = f"leave it out, or set {called['num_workers']} to 1 or more"
        return f"{called['prefetch_factor']} is for workers, and {called['num_workers']} is 0", remedy
    if ahead is not None and (not isinstance(ahead, int) or ahead < 1):
        return f"{called['prefetch_factor']} is {ahead!r}, but must be a whole number of 1 or more", "2 is usual"
    return None
