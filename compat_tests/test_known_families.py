"""Every model family in a trainer's own tables is known here; its sources are read, and nothing is imported."""

import re

from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES as MUSUBI_FAMILIES
from kohya_bucket.trainers.musubi.families import defined_in
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES as SD_SCRIPTS_FAMILIES


def test_those_of_sd_scripts(sd_scripts_dir):
    found = {path.stem.removeprefix("strategy_") for path in (sd_scripts_dir / "library").glob("strategy_*.py")}
    assert found - {"base"} <= SD_SCRIPTS_FAMILIES.keys()


def test_those_of_musubi_tuner(musubi_source):
    """Of each the code says what the table does; further ones are known by the code."""
    package = musubi_source / "musubi_tuner"
    files = [package / "dataset" / name for name in ("architectures.py", "image_video_dataset.py")]  # second: older
    text = next(file for file in files if file.is_file()).read_text(encoding="utf-8")
    named = re.findall(r'^(ARCHITECTURE_\w+) = "(\w+)"', text, re.MULTILINE)
    known = defined_in(package)
    assert known.keys() == {value for name, value in named if not name.endswith("_FULL")}
    for name in known.keys() & MUSUBI_FAMILIES.keys():
        read, ours = known[name], MUSUBI_FAMILIES[name]
        for what in ("full_name", "steps", "target_fps", "controls"):
            assert getattr(read, what) == getattr(ours, what), (name, what)
        assert (read.grid.stride, read.grid.base) == (ours.grid.stride, ours.grid.base), name
