"""One word, one meaning: no class has the name of another room's, and texts are plain English."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import kohya_bucket

PACKAGE = Path(kohya_bucket.__file__).parent
# Another package's interface, under that package's names.
EXEMPT = {PACKAGE / "bucketsampler.py"}
# Doors may use one word for one role.
DOORS = {"sdscripts", "musubi", "ai_toolkit", "anima_lora"}


def _room(path: Path) -> str:
    folders = path.relative_to(PACKAGE).parts[:-1]
    return folders[1] if folders[:1] == ("trainers",) and len(folders) > 1 else (*folders, "root")[0]


def test_no_class_name_stands_in_two_rooms() -> None:
    rooms: dict[str, set[str]] = defaultdict(set)
    for path in set(PACKAGE.rglob("*.py")) - EXEMPT:
        for name in re.findall(r"^ *class (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            rooms[name].add(_room(path))
    assert rooms["BucketSet"] == {"buckets"}
    assert {name: found for name, found in rooms.items() if len(found) > 1 and not found <= DOORS} == {}


# Words for word from another language, and a second spelling of "dataset".
_FOREIGN = re.compile(
    r"(?<![Tt]here )\b(?:is|are) no (?!longer|larger|older|newer|more)\w+|\bnot one of (?!ours|yours|that)"
    r"|\bnobody knows|\bfor ever\b|\bdata sets?\b|\bothers? than those\b"
)


def test_texts_are_plain_english() -> None:
    root = Path(__file__).parents[2]
    files = [path for kind in ("*.py", "*.js", "*.html") for path in PACKAGE.rglob(kind)]
    made = ("compatibility.md", "troubleshooting.md")
    pages = [path for path in (root / "docs").glob("*.md") if path.name not in made]
    found = []
    for path in [*files, *pages, root / "README.md"]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found += [f"{path.name}:{number}: {match[0]}" for match in _FOREIGN.finditer(line)]
    assert found == []
