"""What a test of `tests/reported/` says about the public reports that it carries; it is in docs/troubleshooting.md."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

_Test = TypeVar("_Test", bound=Callable[..., None])
_SOURCE = re.compile(r"[\w.-]+/[\w.-]+#\d+")


@dataclass(frozen=True)
class Report:
    """One row of docs/troubleshooting.md.

    symptom: in the words that people search for. sources: `owner/repository#number` each, or empty where the case was
    measured and not found reported. trainer: what the trainer does. here: what happens with this package. command: what
    shows it. origin: where the test's right value comes from, such as Pillow, or the trainer's own reader.
    """

    symptom: str
    sources: tuple[str, ...]
    trainer: str
    here: str
    command: str
    origin: str

    def __post_init__(self) -> None:
        wrong = [s for s in self.sources if not _SOURCE.fullmatch(s)]
        if wrong:
            raise ValueError(f"a source is owner/repository#number, not {wrong[0]!r}")


def reported(
    symptom: str, *sources: str, trainer: str, here: str, command: str, origin: str
) -> Callable[[_Test], _Test]:
    """Mark a test as the one that carries a public report."""
    report = Report(symptom, sources, trainer, here, command, origin)

    def mark(test: _Test) -> _Test:
        test.report = report  # type: ignore[attr-defined]
        return test

    return mark
