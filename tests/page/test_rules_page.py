"""docs/rules.md: its outputs and figures are what the code gives; so are the README's."""

import doctest
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket.buckets.choices import AUTO_METHODS, NO_UPSCALE_FITS, SWITCHING_METHODS, TRAINERS
from kohya_bucket.buckets.rules.registry import rule_choices

DOCS = Path(__file__).parents[2] / "docs"


def test_every_output_on_the_page() -> None:
    failures, examples = doctest.testfile(str(DOCS / "rules.md"), module_relative=False, encoding="utf-8")
    assert failures == 0
    assert examples >= 30


def _draw():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "figures" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.figures()


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "kohya-512.svg",
        "switching-512.svg",
        "max-crop-512.svg",
        "sets-1024.svg",
        "epochs.svg",
        "proof-light.svg",
        "proof-dark.svg",
    ],
)
def test_every_figure_is_what_the_code_draws(name) -> None:
    number = re.compile(r"-?\d+\.?\d*")
    kept, drawn = (DOCS / "figures" / name).read_text(encoding="utf-8"), _draw()[name].to_svg()
    assert number.sub("#", kept) == number.sub("#", drawn)
    # Logarithms may differ in the last bit between machines, and a coordinate by its last digit.
    pairs = (np.array(number.findall(text), dtype=float) for text in (kept, drawn))
    np.testing.assert_allclose(*pairs, atol=0.11)


def test_the_pages_name_every_figure() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "rules.md", DOCS.parent / "README.md"))
    named = set(re.findall(r"figures/([\w-]+\.svg)", text))
    assert named == set(_draw()) == {p.name for p in (DOCS / "figures").glob("*.svg")}


def _rows() -> list[list[str]]:
    lines = (DOCS / "rules.md").read_text(encoding="utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]


@pytest.mark.parametrize(
    ("option", "known"),
    [
        ("rule", rule_choices()),
        ("switching", SWITCHING_METHODS),
        ("no_upscale_fit", NO_UPSCALE_FITS),
        ("auto_method", AUTO_METHODS),
    ],
)
def test_the_page_lists_every_choice(option, known) -> None:
    listed = {row[1].strip("`"): row[2] for row in _rows() if row[0] == f"`{option}`"}
    assert listed == {name: choice.text for name, choice in known.items()}


def test_the_page_lists_every_trainer() -> None:
    rows = {row[0].strip("`"): row[1] for row in _rows()}
    assert {name: rows.get(name) for name in TRAINERS} == {name: choice.text for name, choice in TRAINERS.items()}
