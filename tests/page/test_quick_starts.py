"""The quick starts in other languages have the commands of the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["zh", "ja"])
def test_the_quick_starts_have_the_commands_of_the_readme(page) -> None:
    """Not their outputs, nor the lines of Python."""
    quick_start = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    commands = re.findall(
        r"^(?:pip|\$ kohya-bucket|kohya-bucket|accelerate) .+$",
        (ROOT / "README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert len(commands) >= 6
    assert [line for line in commands if line.removeprefix("$ ") not in quick_start.splitlines()] == []
