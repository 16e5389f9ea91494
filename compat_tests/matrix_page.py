"""`docs/compatibility.md` from what `matrix.py` found: a row per version of sd-scripts, and what lies behind it."""

from __future__ import annotations

import collections
import json
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RESULTS", "newest_verified", "page_of", "read_results", "write_page"]

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS.parents[1] / "docs" / "compatibility.md"

_TOP = """# Which versions of sd-scripts it works with

Written by `compat_tests/matrix.py`, which runs the adapter in each of these checkouts, in that version's own
environment, through sd-scripts' real data sets, loaders and trainers. *Seams* are the places in sd-scripts' code that
the adapter takes hold of; all are checked before one is touched. *Training runs* are those of the real
`train_network.py`, started by `python -m kohya_bucket.launch` or from a patched checkout, that ended well and trained
what they should.
"""


def read_results() -> list[dict[str, Any]]:
    """What is known of each version: sd-scripts' own by age, then forks."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))]
    return sorted(found, key=lambda result: (result["fork"], result["date"], result["version"]))


def is_verified(result: dict[str, Any]) -> bool:
    """All tests were run and none failed."""
    files = result["files"]
    return bool(files) and "refused" not in result["adapter"] and not any(file["failed"] for file in files.values())


def newest_verified(results: list[dict[str, Any]]) -> str:
    """The youngest of sd-scripts' own versions in which everything passed; empty if there is none."""
    return next((result["version"] for result in reversed(results) if not result["fork"] and is_verified(result)), "")


def write_page(results: list[dict[str, Any]]) -> None:
    PAGE.write_text(page_of(results), encoding="utf-8", newline="\n")


def page_of(results: list[dict[str, Any]]) -> str:
    newest = newest_verified(results)
    lines = [_TOP, *([f"Newest version verified: **{newest}**.", ""] if newest else [])]
    lines += [
        "| sd-scripts | commit | of | verified on | seams | passed | skipped | failed | training runs | limited there |"
    ]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]
    lines += [_row(result) for result in results]
    lines += [
        "",
        "## What was run in which environment",
        "",
        "| sd-scripts | packages | longest |",
        "| --- | --- | --- |",
    ]
    for result in results:
        packages = ", ".join(f"{name} {version}" for name, version in result["adapter"].get("packages", {}).items())
        seconds = sum(file["seconds"] for file in result["files"].values())
        lines.append(f"| {result['version']} | {packages} | {seconds / 60:.0f} minutes |")
    lines += ["", "## What is skipped, and why", ""]
    for reason, versions in sorted(_skips(results).items()):
        lines.append(f"- {reason}: {', '.join(f'{version} ({n})' for version, n in versions.items())}")
    failures = [(r["version"], line) for r in results for file in r["files"].values() for line in file["failed"]]
    if failures:
        lines += ["", "## What fails", "", *(f"- {version}: `{line}`" for version, line in failures)]
    return "\n".join(lines) + "\n"


def _row(result: dict[str, Any]) -> str:
    files, adapter = result["files"].values(), result["adapter"]
    skipped = sum(n for file in files for n in file["skipped"].values())
    runs = collections.Counter[str]()
    for file in files:
        runs.update(file["runs"])
    seams = sum(adapter.get("seams", {}).values())
    limits = [f"{text} ({reason})" for text, reason in adapter.get("left", {}).items()]
    limits = [f"refused: {adapter['refused']}"] if "refused" in adapter else limits
    cells = [result["version"], result["commit"][:8], result["date"], max((file["on"] for file in files), default="")]
    cells += [seams or "", sum(file["passed"] for file in files), skipped, sum(len(file["failed"]) for file in files)]
    cells += [", ".join(f"{n} {kind}" if n > 1 else kind for kind, n in sorted(runs.items())) or "none"]
    return "| " + " | ".join(map(str, [*cells, "; ".join(limits) or "nothing"])) + " |"


def _skips(results: list[dict[str, Any]]) -> dict[str, collections.Counter[str]]:
    """{reason: {version: how many tests}}."""
    found: dict[str, collections.Counter[str]] = {}
    for result in results:
        for file in result["files"].values():
            for reason, n in file["skipped"].items():
                found.setdefault(reason.removeprefix("Skipped: "), collections.Counter())[result["version"]] += n
    return found
