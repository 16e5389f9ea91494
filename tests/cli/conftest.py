"""Images that commands are tried on."""

from pathlib import Path

import pytest

from tests.pictures import make_pictures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """0.png, 1.png and 2.png, of 300x400, 400x400 and 500x400 pixels, in tmp_path/data."""
    make_pictures(tmp_path / "data", [(300, 400), (400, 400), (500, 400)])
    return tmp_path / "data"
