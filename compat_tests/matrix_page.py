"""`docs/compatibility.md` from what `matrix.py` found, a row for each version, and the details beside the results."""

import json
import re
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RESULTS", "newest_verified", "page_of", "read_results", "write_page"]

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = RESULTS.parents[1] / "docs" / "compatibility.md"

DETAILS = "README.md"  # in RESULTS

_TOP = """# Verified versions of the trainers

Each version was run in its own environment, on Linux, with the trainer's real datasets, loaders and trainers
(`compat_tests/matrix.py`, which writes this page; [environments, kinds of runs and skipped
tests](../compat_tests/results/README.md)). *Training runs* are runs of a real trainer with a tiny model that finished
and trained the expected images. A version that ends in **-by-hand** is an approximation: the checkout before it, with
what could be had of the release; in November 2026 no newer ones are known. [What ran on
Windows](gui.md#what-was-checked). ai-toolkit (27a03a91) and anima_lora (0acdb05b) are [on their page](ai-toolkit.md).
"""
_DETAILS_TOP = """# What was run at each version

`compat_tests/matrix.py` writes this page beside its results.

- **seams**: places in the trainer's code that the adapter replaces. It checks all of them before it replaces one.
- **training runs**: runs of a real trainer, started with `python -m kohya_bucket.launch`, from a patched checkout or by
  an activated Python, that finished and trained the expected images.
- **limited**: what the trainer's own code still does in that version.
"""
_TRAINERS = ("sd-scripts", "musubi-tuner")
_BY_HAND = "-by-hand"  # what the name of a version ends in that was put together from parts of a release
_ONE_TRAINER = re.compile(r"(\w+\.py), (cached|not cached)(?:: (.*))?$")


def read_results() -> list[dict[str, Any]]:
    """What is known of each version: the trainers' own by age, then forks."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(RESULTS.glob("*.json"))]
    return sorted(found, key=lambda result: (result["fork"], result["date"], result["version"]))


def is_verified(result: dict[str, Any]) -> bool:
    """All tests were run and none failed."""
    files = result["files"]
    return bool(files) and "refused" not in result["adapter"] and not any(file["failed"] for file in files.values())


def newest_verified(results: list[dict[str, Any]]) -> str:
    """The youngest release of sd-scripts in which everything passed, and what is younger still; empty without one."""
    own = [one for one in _of("sd-scripts", results) if not one["fork"] and not one["version"].endswith(_BY_HAND)]
    verified = [one for one in own if is_verified(one)]
    release = next((result for result in reversed(verified) if re.fullmatch(r"v[\d.]+", result["version"])), None)
    if release is None:
        return ""
    younger = [f"{r['version']} of {r['date']}" for r in verified[verified.index(release) + 1 :]]
    return ", and ".join([release["version"], *younger[-1:]])


def write_page(results: list[dict[str, Any]]) -> None:
    PAGE.write_text(page_of(results), encoding="utf-8", newline="\n")
    (RESULTS / DETAILS).write_text(details_of(results), encoding="utf-8", newline="\n")


def page_of(results: list[dict[str, Any]]) -> str:
    """What ran, in one table."""
    newest = newest_verified(results)
    lines = [_TOP, *([f"Newest version of sd-scripts verified: **{newest}**.", ""] if newest else [])]
    columns = ("trainer", "version", "of", "verified on", "tests passed", "failed", "training runs")
    lines += [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for trainer in _TRAINERS:
        for result in _of(trainer, results):
            files = result["files"].values()
            cells = [trainer, result["version"], result["date"], max((file["on"] for file in files), default="")]
            cells += [sum(file["passed"] for file in files), sum(len(file["failed"]) for file in files)]
            cells.append(sum(n for file in files for n in file["runs"].values()))
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def details_of(results: list[dict[str, Any]]) -> str:
    """Environments, kinds of runs, skipped and failed tests."""
    lines = [_DETAILS_TOP]
    for trainer in _TRAINERS:
        lines += _about(trainer, _of(trainer, results))
    return "\n".join(lines).rstrip() + "\n"


def _of(trainer: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [result for result in results if result.get("trainer", _TRAINERS[0]) == trainer]


def _about(trainer: str, results: list[dict[str, Any]]) -> list[str]:
    """The part of the page about one trainer; empty where nothing is known of it."""
    if not results:
        return []
    columns = ("commit", "date", "verified on", "seams", "passed", "skipped", "failed", "training runs", "limited")
    lines = [f"## {trainer}", "", f"| {' | '.join([trainer, *columns])} |", "|" + " --- |" * (len(columns) + 1)]
    lines += [_row(result) for result in results]
    lines += _each_trainer(trainer, results)
    lines += ["", f"### {trainer}: environments", ""]
    lines += [f"| {trainer} | this package | other packages | duration of the tests |", "| --- | --- | --- | --- |"]
    for result in results:
        packages = ", ".join(f"{name} {version}" for name, version in result["adapter"].get("packages", {}).items())
        seconds = sum(file["seconds"] for file in result["files"].values())
        commits = ", ".join(sorted({file.get("package", "") for file in result["files"].values()} - {""}))
        lines.append(f"| {result['version']} | {commits} | {packages} | {seconds / 60:.0f} minutes |")
    lines += ["", f"### {trainer}: training runs by kind", "", *_by_text(results, "runs")]
    lines += ["", f"### {trainer}: skipped tests, with the reason", "", *_by_text(results, "skipped"), ""]
    failures = [(r["version"], line) for r in results for file in r["files"].values() for line in file["failed"]]
    if failures:
        lines += [f"### {trainer}: failed tests", "", *(f"- {version}: `{line}`" for version, line in failures), ""]
    return lines


def _each_trainer(trainer: str, results: list[dict[str, Any]]) -> list[str]:
    """A table of the trainer's programs: where one epoch trained every image exactly once, and how else it ended."""
    table: dict[str, dict[str, list[str]]] = {}
    for result in results:
        for file in result["files"].values():
            for text in [*file["runs"], *file["skipped"]]:
                match = _ONE_TRAINER.match(text.removeprefix("Skipped: "))
                if match:
                    cells = table.setdefault(match[1], {"not cached": [], "cached": [], "else": []})
                    cells["else" if match[3] else match[2]].append(
                        f"{result['version']}, {match[2]}: {match[3]}" if match[3] else result["version"]
                    )
    if not table:
        return []
    lines = [
        "",
        f"### {trainer}: trainers",
        "",
        "Each was started by `python -m kohya_bucket.launch` with a small model and",
    ]
    lines += ["trained one epoch, every image exactly once, in these versions.", ""]
    lines += ["| trainer | not cached | cached on disk | otherwise |", "| --- | --- | --- | --- |"]
    cells = ([name, *(", ".join(row[key]) for key in ("not cached", "cached")), "; ".join(row["else"])]
             for name, row in sorted(table.items()))  # fmt: skip
    return lines + [f"| {' | '.join(row)} |" for row in cells]


def _row(result: dict[str, Any]) -> str:
    files, adapter = result["files"].values(), result["adapter"]
    skipped = sum(n for file in files for n in file["skipped"].values())
    seams = sum(adapter.get("seams", {}).values())
    limits = [f"{text} ({reason})" for text, reason in adapter.get("left", {}).items()]
    limits += [f"{text} (this version has no place to replace)" for text in adapter.get("absent", [])]
    limits = [f"refused: {adapter['refused']}"] if "refused" in adapter else limits
    cells = [result["version"], result["commit"][:8], result["date"], max((file["on"] for file in files), default="")]
    cells += [seams or "", sum(file["passed"] for file in files), skipped, sum(len(file["failed"]) for file in files)]
    cells.append(sum(n for file in files for n in file["runs"].values()))
    return "| " + " | ".join(map(str, [*cells, "; ".join(limits) or "nothing"])) + " |"


def _by_text(results: list[dict[str, Any]], key: str) -> list[str]:
    """A line for each reason or kind, with the versions and how many tests there."""
    found: dict[str, dict[str, int]] = {}
    for result in results:
        for file in result["files"].values():
            for text, n in file[key].items():
                if _ONE_TRAINER.match(text.removeprefix("Skipped: ")):
                    continue  # has a table of its own
                versions = found.setdefault(text.removeprefix("Skipped: "), {})
                versions[result["version"]] = versions.get(result["version"], 0) + n
    lines = []
    for text, versions in sorted(found.items()):
        everywhere = len(versions) == len(results) > 1 and len(set(versions.values())) == 1
        where = ", ".join(f"{version} ({n})" for version, n in versions.items())
        lines.append(f"- {text}: {f'everywhere ({next(iter(versions.values()))})' if everywhere else where}")
    return lines or ["- none"]
