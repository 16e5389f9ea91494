"""Writes docs/reported.md from the tests in tests/reported/: python docs/make_reported.py"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from tests.reported.case import Report  # noqa: E402

_HEAD = """# Reported elsewhere, right here

What people reported of trainers and libraries, and what happens with this package. Each row is a test in
`tests/reported/`, and `python docs/make_reported.py` makes this page from those tests.
"""


def page() -> str:
    parts = [_HEAD]
    for path in sorted((HERE.parent / "tests" / "reported").glob("test_*.py")):
        module = importlib.import_module(f"tests.reported.{path.stem}")
        reports = [r for test in vars(module).values() if (r := getattr(test, "report", None)) is not None]
        if reports:
            parts += [f"## {(module.__doc__ or path.stem).splitlines()[0].rstrip('.')}\n", *_table(reports)]
    return "\n".join(parts)


def _table(reports: list[Report]) -> Iterator[str]:
    yield "| symptom | what the trainer does | what happens here | shown by | reported in |"
    yield "| --- | --- | --- | --- | --- |"
    for report in reports:
        cells = (
            report.symptom,
            report.trainer,
            f"{report.here} (compared with: {report.origin})",
            f"`{report.command}`",
            ", ".join(report.sources) or "measured",
        )
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""


if __name__ == "__main__":
    (HERE / "reported.md").write_text(page(), encoding="utf-8", newline="\n")
