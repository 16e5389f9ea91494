"""The page of benchmarks holds the table of each claim, as it was measured last."""

import runpy
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COLLECT = runpy.run_path(str(BENCHMARKS / "collect.py"))


def test_the_page_is_what_the_results_say() -> None:
    assert COLLECT["page"]() == (BENCHMARKS / "README.md").read_text(encoding="utf-8")


def test_every_benchmark_has_a_claim() -> None:
    measured = {path.stem for path in (BENCHMARKS / "results").glob("*.md")} - {"scan_tricks"}  # of what was left out
    assert measured == set(COLLECT["CLAIMS"])
