"""The Python snippet of docs/report.md runs as printed."""

import re
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).resolve().parents[2] / "docs" / "report.md"


def test_the_snippet_runs_as_printed(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "data").mkdir()
    for i in range(3):
        Image.new("RGB", (500 + 90 * i, 400)).save(tmp_path / "data" / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(snippet, str(DOCS), "exec"), {})
    assert "0." in capsys.readouterr().out
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
