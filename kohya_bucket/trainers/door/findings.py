"""What is wrong with a config and its images: collected in one list and reported at once."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from kohya_bucket.extras import argument
from kohya_bucket.images.listing import from_here
from kohya_bucket.images.parallel import Progress
from kohya_bucket.texts import some


class Teller:
    """Whom a method that takes long tells how far it is: here nobody."""

    def progress(self, title: str) -> AbstractContextManager[Progress | None]:
        """A progress function while something of this title goes on; None where nobody looks."""
        return nullcontext(None)

    def say(self, line: str) -> None:
        """Say a line beside the output."""


class Severity(enum.Enum):
    """How bad a finding is.

    `ERROR`: the trainer refuses the config or stops. `WARNING`: it trains, but not what was meant.
    `NOTE`: good to know.
    """

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


HARMS = ("stops training", "not trained", "harms training", "worth a look")
"""What is wrong does this to a training, the worst first: the order of everything that is to be changed."""
STOPS, NOT_TRAINED, HARMFUL, MINOR = HARMS
_NOT_TRAINED = {
    "hidden-images", "left-out", "never-trained", "not-trained", "too-short", "undecodable", "unreadable-image",
}  # fmt: skip


def is_minor(count: int, total: int) -> bool:
    """Whether so few of `total` hardly harm a training."""
    return 100 * count < total


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        severity: how bad it is.
        code: a short stable name for programs, e.g. `unknown-key`.
        where: the place in the config, e.g. `line 7, dataset 1, subset 2`; empty for the whole file.
        message: what is wrong, with the value, and why it matters.
        remedy: what to do; may be empty.
        names: the files or keys concerned, all of them.
        count: how many files or keys it names, 1 for none; of the last of many of one kind, for how many it stands.
    """

    severity: Severity
    code: str
    where: str
    message: str
    remedy: str = ""
    names: tuple[str, ...] = ()
    count: int = 1

    @property
    def kind(self) -> tuple[object, ...]:
        """What findings that say the same of different places have in common. Of keys each of the first is a kind."""
        return self.severity, self.code, self.names if self.code in _OF_KEYS else ()

    @property
    def harm(self) -> str:
        """One of `HARMS`."""
        if self.severity is Severity.WARNING:
            return NOT_TRAINED if self.code in _NOT_TRAINED else HARMFUL
        return STOPS if self.severity is Severity.ERROR else MINOR

    @property
    def stops_alone(self) -> bool:
        """The trainer stops at it, and with this package it goes on: an image that cannot be read."""
        return self.severity is Severity.WARNING and self.code in ("left-out", "undecodable")

    @property
    def text(self) -> str:
        """Place, message and remedy in one line."""
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.message}" + (f": {self.remedy}" if self.remedy else "")

    def __str__(self) -> str:
        return self.text

    def as_dict(self, all_names: bool = False) -> dict[str, Any]:
        """For JSON, with the first 1,000 names, or all; `count` is that of all."""
        names = self.names if all_names else self.names[:_NAMED]
        return asdict(self) | {"severity": self.severity.value, "names": list(names)}


_OF_KEYS = frozenset({"unknown-key", "misplaced-key", "wrong-type", "bool-as-number", "overruled"})
_SHOWN = 3
_KEYS = 20
_NAMED = 1000


class Findings:
    """A growing list of findings. Of each kind it gives three, and then one that stands for the others.

    Of keys each is a kind, up to twenty; all further ones are one.
    """

    def __init__(self) -> None:
        self._items: list[Finding] = []

    def error(self, code: str, where: str, message: str, remedy: str = "", names: Iterable[str] = ()) -> None:
        """Add something that the trainer stops at."""
        self._add(Severity.ERROR, code, where, message, remedy, names)

    def warning(self, code: str, where: str, message: str, remedy: str = "", names: Iterable[str] = ()) -> None:
        """Add something that spoils the training without stopping it."""
        self._add(Severity.WARNING, code, where, message, remedy, names)

    def note(self, code: str, where: str, message: str, remedy: str = "", names: Iterable[str] = ()) -> None:
        """Add something that is good to know."""
        self._add(Severity.NOTE, code, where, message, remedy, names)

    def of_share(self, code: str, where: str, message: str, remedy: str, names: Iterable[str], total: int) -> None:
        """Add what spoils the training of these of `total`: below one in a hundred it is a note."""
        named = tuple(names)
        severity = Severity.NOTE if is_minor(len(named), total) else Severity.WARNING
        self._add(severity, code, where, message, remedy, named)

    def _add(self, severity: Severity, code: str, where: str, message: str, remedy: str, names: Iterable[str]) -> None:
        named = tuple(names)
        self._items.append(Finding(severity, code, where, message, remedy, named, max(len(named), 1)))

    def add(self, others: Iterable[Finding]) -> None:
        self._items += others

    def __iter__(self) -> Iterator[Finding]:
        """The worst first; of one harm those of a kind together, in the order in which they were made."""
        kinds: dict[tuple[object, ...], list[Finding]] = {}
        keys: Counter[tuple[object, ...]] = Counter()
        for finding in dict.fromkeys(self._items):
            kind, of_any_key = finding.kind, finding.kind[:2]
            keys[of_any_key] += kind not in kinds
            kinds.setdefault(kind if kind in kinds or keys[of_any_key] <= _KEYS else of_any_key, []).append(finding)
        shown = chain.from_iterable(map(_bounded, kinds.values()))
        return iter(sorted(shown, key=lambda finding: HARMS.index(finding.harm)))

    def __len__(self) -> int:
        return len(self._items)

    def of(self, severity: Severity) -> list[Finding]:
        return [f for f in self if f.severity is severity]

    @property
    def serious(self) -> list[Finding]:
        """Those that are more than notes."""
        return [finding for finding in self if finding.severity is not Severity.NOTE]


def _bounded(alike: list[Finding]) -> list[Finding]:
    """The first of a kind, and one that stands for the others."""
    if len(alike) <= _SHOWN + 1:
        return alike
    first, alike = alike[:_SHOWN], alike[_SHOWN:]
    of_keys = len({one.names for one in alike}) > 1 and alike[0].code in _OF_KEYS
    names = [", ".join(one.names) if of_keys else one.where or one.message for one in alike]
    message = f"and {len(alike):,} more of this kind ({some(list(dict.fromkeys(names)))})"
    one = replace(alike[0], where="", message=message, remedy="", names=tuple(names[:_NAMED]), count=len(alike))
    return [*first, one]


def fix_command(paths: Iterable[str]) -> str:
    """The command that mends files, or sets them aside, in the folders that these are in."""
    folders = [folder for folder in dict.fromkeys(Path(path).parent for path in paths) if folder.is_dir()]
    return " and ".join(f"`kohya-bucket fix {argument(from_here(str(folder)))}`" for folder in folders[:2]) or (
        "`kohya-bucket fix`"
    )
