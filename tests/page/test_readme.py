"""What the README and the tutorials show on a terminal is what the commands print."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_CONFIG = """
[[datasets]]
resolution = 512
batch_size = 4
enable_bucket = true

  [[datasets.subsets]]
  image_dir = "configs/demo_images"
  num_repeats = 5
  caption_extension = ".txt"
"""


def shown(page: str) -> list[tuple[list[str], list[str]]]:
    """(arguments, lines) of each `$ kohya-bucket …` on a page, and of each command whose output is the next block."""
    text = (ROOT / page).read_text(encoding="utf-8")
    together = re.findall(r"^```\n(\$ .+?)^```", text, re.MULTILINE | re.DOTALL)
    parts = [part.split("\n", 1) for block in together for part in block.split("$ kohya-bucket ")[1:]]
    parts += re.findall(
        r"^```bash\nkohya-bucket ((?:plan|simulate) [^\n]+)\n```\n\n```\n(.+?)^```", text, re.MULTILINE | re.DOTALL
    )
    return [(shlex.split(command), [" ".join(line.split()) for line in lines.splitlines()]) for command, lines in parts]


@pytest.mark.long
@pytest.mark.parametrize(
    ("page", "examples"),
    [
        ("README.md", 3), ("docs/troubleshooting.md", 3), ("docs/look.md", 1), ("docs/sd-scripts.md", 2),
        ("docs/planning.md", 1),
    ],
)  # fmt: skip
def test_what_commands_print(page, examples, command_line, tmp_path, monkeypatch) -> None:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "my.toml").write_text(_CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    found = shown(page)
    assert len(found) == examples
    for arguments, lines in found:
        _, out, said = command_line(*arguments)
        printed = [" ".join(line.replace(os.sep, "/").split()) for line in (*out.splitlines(), *said.splitlines())]
        assert [line for line in lines if line not in (*printed, "…")] == []


def test_the_tutorials_use_this_config() -> None:
    page = (ROOT / "docs/sd-scripts.md").read_text(encoding="utf-8")
    assert f"```toml{_CONFIG}```" in page


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
