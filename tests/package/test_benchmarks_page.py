"""The page of benchmarks holds every table that was measured last."""

import runpy
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_page_is_what_the_results_say() -> None:
    page = runpy.run_path(str(BENCHMARKS / "collect.py"))["page"]()
    assert page == (BENCHMARKS / "README.md").read_text(encoding="utf-8")
