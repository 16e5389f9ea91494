"""`doctor` of anima_lora's folders: what lies in the resized one, and what its source would give."""

import json
import os
import random
from pathlib import Path

import pytest
from PIL import Image

from tests.command_line import command_line

__all__ = ["command_line"]


@pytest.mark.parametrize("seed", range(5))
def test_each_image_is_named_by_what_became_of_it(tmp_path, command_line, seed):
    draws, states = random.Random(seed), {}
    for number in range(30):
        name = f"{draws.choice(('', 'a/', 'a/b/'))}{number}"
        states[name] = draws.choice(("current", "not-resized", "resized-older", "resized-alone"))
        for folder, ending, absent in (("source", ".jpg", "resized-alone"), ("resized", ".png", "not-resized")):
            file = tmp_path / folder / (name + ending)
            file.parent.mkdir(parents=True, exist_ok=True)
            if states[name] != absent:
                Image.new("RGB", (8, 8)).save(file)
                os.utime(file, (0, 2000 if folder == "source" else 1000 if "older" in states[name] else 3000))
    config = tmp_path / "train.toml"
    source, resized = (tmp_path / name for name in ("source", "resized"))
    config.write_text(
        f"source_image_dir = '{source.as_posix()}'\nresized_image_dir = '{resized.as_posix()}'\n", encoding="utf-8"
    )
    _, out, _ = command_line("doctor", config, "--json")
    found = {one["code"]: one for section in json.loads(out)["sections"] for one in section["findings"]}
    for code in ("not-resized", "resized-older", "resized-alone"):
        folder = tmp_path / ("source" if code == "not-resized" else "resized")
        named = {Path(path).relative_to(folder).with_suffix("").as_posix() for path in found[code]["names"]}
        assert named == {name for name, state in states.items() if state == code}
    code, _, said = command_line("plan", config)
    assert code == 2
    assert "is a config of anima_lora" in said
