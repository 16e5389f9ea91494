"""Rooms below the doors name no trainer: whoever adds one finds nothing of another there."""

import re
from pathlib import Path

import pytest

import kohya_bucket

PACKAGE = Path(kohya_bucket.__file__).parent


@pytest.mark.parametrize("room", ["latents", "datasets", "trainers/door"])
def test_no_trainer_is_named(room: str) -> None:
    files = sorted((PACKAGE / room).rglob("*.py"))
    assert len(files) > 10
    named = re.compile(r"sd[-_]?scripts|musubi|ai[-_]toolkit|anima_lora", re.IGNORECASE)
    texts = ((file, file.read_text(encoding="utf-8").splitlines()) for file in files)
    assert [(str(file), line) for file, lines in texts for line in lines if named.search(line)] == []
