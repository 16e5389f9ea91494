"""The page on the layout names what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "ARCHITECTURE.md"
ROOMS = (
    "buckets", "images", "planning", "latents", "datasets", "trainers/door", "trainers/sdscripts", "trainers/musubi",
    "cli", "reports", "originals",
)  # fmt: skip


def test_every_file_that_is_named_in_full_is_there():
    named = re.findall(r"`((?:kohya_bucket|tests|docs)/[\w./]+)`", PAGE.read_text(encoding="utf-8"))
    assert len(named) > 12
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_file_that_is_named_in_its_room_is_there(room):
    text = PAGE.read_text(encoding="utf-8")
    row = re.search(rf"^\| `{room}/`.*$", text, re.MULTILINE)
    listed = row[0] if row else ""
    paragraph = re.search(rf"^In `{room}/`:.*?\n\n", text, re.MULTILINE | re.DOTALL)
    listed += paragraph[0] if paragraph else ""
    files = re.findall(r"`([\w/]+\.py)`", listed)
    missing = [file for file in files if not any((ROOT / "kohya_bucket" / at / file).is_file() for at in (room, "."))
               and not (ROOT / "kohya_bucket" / file).is_file()]  # fmt: skip
    assert missing == []


def test_every_room_is_on_the_page():
    there = {path.name for path in (ROOT / "kohya_bucket").iterdir() if (path / "__init__.py").is_file()}
    text = PAGE.read_text(encoding="utf-8")
    assert [room for room in there if f"`{room}/`" not in text] == []
