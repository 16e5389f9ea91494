"""Writes the tables of docs/troubleshooting.md from the tests in tests/reported/: python docs/make_reported.py"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.reported.case import Report  # noqa: E402

PAGE = HERE / "troubleshooting.md"
_HEADING = "## Reported elsewhere\n"


def page() -> str:
    """The page, with the part behind its last heading made anew."""
    written = PAGE.read_text(encoding="utf-8")
    parts = [written[: written.index(_HEADING) + len(_HEADING)], _INTRODUCTION]
    for path in sorted((HERE.parent / "tests" / "reported").glob("test_*.py")):
        module = importlib.import_module(f"tests.reported.{path.stem}")
        reports = [r for test in vars(module).values() if (r := getattr(test, "report", None)) is not None]
        if reports:
            parts += [f"### {(module.__doc__ or path.stem).splitlines()[0].rstrip('.')}\n", *_table(reports)]
    return "\n".join(parts)


_INTRODUCTION = """What people reported of trainers and libraries, and what happens here. Each row is a test in
`tests/reported/`, from which `python docs/make_reported.py` makes these tables.
"""


def _table(reports: list[Report]) -> Iterator[str]:
    yield "| symptom | the trainer alone | here | shown by |"
    yield "|---|---|---|---|"
    for report in reports:
        sources = f" ({', '.join(map(_link, report.sources))})" if report.sources else ""
        cells = (report.symptom + sources, report.trainer, report.here, f"`{report.command}`")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


def _link(source: str) -> str:
    repository, number = source.split("#")
    return f"[{source.split('/')[1]}](https://github.com/{repository}/issues/{number})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8", newline="\n")
