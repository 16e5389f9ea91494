"""What docs/tutorial-loop.md shows runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from PIL import Image

pytest.importorskip("pyarrow")

from typer.testing import CliRunner

from kohya_bucket import cli

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "tutorial-loop.md").read_text(encoding="utf-8")


def block(language: str, word: str) -> str:
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL) if word in text]
    return str(found)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (90, 60)).save(folder / "a.jpg", exif=exif)
    Image.new("RGB", (70, 80)).save(folder / "b.jpg", "PNG")
    (folder / "c.jpg").write_bytes(b"no image")
    monkeypatch.chdir(tmp_path)
    return folder


def test_sizes(data: Path) -> None:
    names = {"paths": sorted(data.glob("*.jpg"))}
    exec(compile(block("python", "read_sizes"), "docs/tutorial-loop.md", "exec"), names)
    scan = names["scan"]
    assert scan.sizes.tolist() == [[90, 60], [70, 80], [0, 0]]
    assert [(i, Path(path).name) for i, path, _ in scan.failures] == [(2, "c.jpg")]
    assert scan.rotated().tolist() == [0]
    assert [(i, what) for i, _, what in scan.mislabelled()] == [(1, "named as JPEG, but holds PNG")]


def test_commands(data: Path) -> None:
    said = []
    for line in block("bash", "cache sizes").splitlines():
        program, *arguments = line.partition("#")[0].split()
        assert program == "kohya-bucket"
        said.append(CliRunner().invoke(cli.app, arguments).stdout)
    assert "3 new" in said[0]
    assert "2 unchanged" in said[1]
