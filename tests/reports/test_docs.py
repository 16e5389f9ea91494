"""The last Python snippet of docs/look.md runs as printed."""

import re
from pathlib import Path

from tests.pictures import make_pictures

DOCS = Path(__file__).resolve().parents[2] / "docs" / "look.md"


def test_the_snippet_runs_as_printed(tmp_path, monkeypatch, capsys) -> None:
    make_pictures(tmp_path / "data", [(500, 400), (590, 400), (680, 400)])
    monkeypatch.chdir(tmp_path)
    *_, snippet = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), flags=re.DOTALL)
    exec(compile(snippet, str(DOCS), "exec"), {})
    assert "0." in capsys.readouterr().out
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
