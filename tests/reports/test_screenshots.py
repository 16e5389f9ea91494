"""The script for the pictures of the pages takes each of them."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("selenium", reason="selenium is not installed: pip install selenium")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_each_picture_can_be_taken_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["screenshots.py"])
    runpy.run_path(str(ROOT / "docs" / "figures" / "screenshots.py"))["main"](tmp_path)
    kept = {file.name: Image.open(file) for file in (ROOT / "docs" / "images").glob("*.webp")}
    assert {file.name for file in tmp_path.iterdir()} == set(kept)
    for name, picture in kept.items():
        taken = Image.open(tmp_path / name)
        assert taken.width == picture.width
        assert abs(taken.height / picture.height - 1) < 0.1, name  # another machine has other fonts
        assert np.asarray(taken.convert("RGB")).std() > 10
        assert getattr(taken, "n_frames", 1) == getattr(picture, "n_frames", 1)
    assert kept["explorer-moving.webp"].n_frames > 5
    assert (ROOT / "docs" / "images" / "explorer-moving.webp").stat().st_size < 1_000_000
