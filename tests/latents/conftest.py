"""Images that the tests of latents encode."""

from pathlib import Path

import pytest


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    """The files of `stub_encoders.SIZES`, in tmp_path/images."""
    from tests.latents.stub_encoders import SIZES, make_images  # which needs torch

    return make_images(tmp_path / "images", SIZES)
