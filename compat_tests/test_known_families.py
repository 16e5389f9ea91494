"""Every model family in a trainer's own tables is known here; its sources are read, and nothing is imported."""

import os
import re
from pathlib import Path

import pytest

from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES as MUSUBI_FAMILIES
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES as SD_SCRIPTS_FAMILIES


def test_those_of_sd_scripts(sd_scripts_dir):
    found = {path.stem.removeprefix("strategy_") for path in (sd_scripts_dir / "library").glob("strategy_*.py")}
    assert found - {"base"} <= SD_SCRIPTS_FAMILIES.keys()


def test_those_of_musubi_tuner():
    name = os.environ.get("MUSUBI_DIR")
    if not name:
        pytest.skip("MUSUBI_DIR is not set: no checkout of musubi-tuner")
    folder = Path(name) / "src" / "musubi_tuner" / "dataset"
    files = [folder / "architectures.py", folder / "image_video_dataset.py"]  # the second in older versions
    text = next(file for file in files if file.is_file()).read_text(encoding="utf-8")
    named = re.findall(r'^(ARCHITECTURE_\w+) = "(\w+)"', text, re.MULTILINE)
    found = {value for name, value in named if not name.endswith("_FULL")}
    assert found
    assert found <= MUSUBI_FAMILIES.keys()
