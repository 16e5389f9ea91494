"""docs/rules.md: its outputs and its figures are what the code gives."""

import doctest
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_every_output_on_the_page() -> None:
    failures, examples = doctest.testfile(str(DOCS / "rules.md"), module_relative=False, encoding="utf-8")
    assert failures == 0
    assert examples > 25


def _draw():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "figures" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.figures()


@pytest.mark.parametrize("name", ["kohya-512.svg", "switching-512.svg", "max-crop-512.svg", "sets-1024.svg"])
def test_every_figure_is_what_the_code_draws(name) -> None:
    number = re.compile(r"-?\d+\.?\d*")
    kept, drawn = (DOCS / "figures" / name).read_text(encoding="utf-8"), _draw()[name].to_svg()
    assert number.sub("#", kept) == number.sub("#", drawn)
    # Logarithms may differ in the last bit between machines, and a coordinate by its last digit.
    pairs = (np.array(number.findall(text), dtype=float) for text in (kept, drawn))
    np.testing.assert_allclose(*pairs, atol=0.11)


def test_the_page_names_every_figure() -> None:
    named = set(re.findall(r"figures/([\w-]+\.svg)", (DOCS / "rules.md").read_text(encoding="utf-8")))
    assert named == set(_draw()) == {p.name for p in (DOCS / "figures").glob("*.svg")}
