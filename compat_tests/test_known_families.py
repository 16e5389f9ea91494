"""Every model family in a trainer's own tables is known here; its sources are read, and nothing is imported."""

import ast
import os
from pathlib import Path

import pytest

from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES as MUSUBI_FAMILIES
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES as SD_SCRIPTS_FAMILIES


def checkout(variable):
    name = os.environ.get(variable)
    if not name:
        pytest.skip(f"{variable} is not set: no checkout to read")
    return Path(name)


def constants(text):
    """{name: value} of what a module sets to a text."""
    assigned = [node for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: node.value.value for node in assigned if isinstance(node.value, ast.Constant)}


def test_those_of_sd_scripts(sd_scripts_dir):
    found = {path.stem.removeprefix("strategy_") for path in (sd_scripts_dir / "library").glob("strategy_*.py")}
    if not found:
        pytest.skip("this version has no strategies")
    assert found - {"base"} <= SD_SCRIPTS_FAMILIES.keys()


def test_those_of_musubi_tuner():
    folder = checkout("MUSUBI_DIR") / "src" / "musubi_tuner" / "dataset"
    files = [folder / "architectures.py", folder / "image_video_dataset.py"]  # the second in older versions
    text = next(file for file in files if file.is_file()).read_text(encoding="utf-8")
    named = {name: value for name, value in constants(text).items() if name.startswith("ARCHITECTURE_")}
    found = {value for name, value in named.items() if not name.endswith("_FULL")}
    assert found
    assert found <= MUSUBI_FAMILIES.keys()
