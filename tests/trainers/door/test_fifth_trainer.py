"""A fifth trainer is a folder with one file: planned, checked and launched, and no other file is touched."""

import collections
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kohya_bucket
import kohya_bucket.trainers
from kohya_bucket.trainers.activation import write
from tests.command_line import command_line
from tests.pictures import make_pictures

__all__ = ["command_line"]
HERE = Path(__file__).parent
LAUNCH = "import sys, kohya_bucket.trainers as t; t.__path__.append(sys.argv.pop(1)); import kohya_bucket.launch as l; "
PROGRAM = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from PIL import Image
import toys.trainer as t

if __name__ == "__main__":
    pictures = [t.Picture(path.name, Image.open(path).size) for path in sorted(Path(sys.argv[1]).glob("*[0-9].png"))]
    seen = t.train(SimpleNamespace(sets=[t.PictureSet(pictures, 2)], epochs=2, workers=0, resume="", stop=0))
    print(json.dumps(seen))
"""


@pytest.fixture
def room(tmp_path, monkeypatch):
    """A folder of trainers, which is one more place of the package's."""
    folder = tmp_path / "room" / "toy_trainer"
    folder.mkdir(parents=True)
    shutil.copy(HERE / "toy_door.py", folder / "trainer.py")
    monkeypatch.setattr(kohya_bucket.trainers, "__path__", [*kohya_bucket.trainers.__path__, str(folder.parent)])
    importlib.invalidate_caches()
    yield folder.parent
    for name in ("kohya_bucket.trainers.toy_trainer", "kohya_bucket.trainers.toy_trainer.trainer"):
        sys.modules.pop(name, None)


@pytest.fixture
def config(tmp_path):
    """Images of random sizes, and a broken one."""
    draw = random.Random(tmp_path.name)
    sizes = [(draw.randrange(100, 700), draw.randrange(100, 700)) for _ in range(23)]
    make_pictures(tmp_path / "images", sizes)
    (tmp_path / "images" / "broken.png").write_text("no image", encoding="utf-8")
    (tmp_path / "toys.toml").write_text(f"toys = '{(tmp_path / 'images').as_posix()}'\n", encoding="utf-8")
    return tmp_path / "toys.toml"


def planned(command_line, config, *arguments):
    code, out, err = command_line("plan", config, "--json", *arguments)
    assert (code, err) == (0, "")
    return json.loads(out)


def test_without_its_folder_its_configs_are_not_known(config, command_line):
    assert command_line("plan", config)[0] == 2


def test_its_configs_are_planned_and_checked(room, config, command_line):
    found = planned(command_line, config, "--gpus", "1,3")
    (data,) = found["datasets"]
    assert (data["images"], [Path(row["path"]).name for row in data["not_trained"]]) == (23, ["broken.png"])
    assert sum(row["samples"] for row in data["buckets"]) == 23
    assert [(row["gpus"], row["missed"]) for row in found["gpus"]] == [(1, 0), (3, 0)]
    assert "Dataset 1: toys" in command_line("plan", config)[1]
    previewed = kohya_bucket.preview(config, gpus=3).data
    assert json.loads(json.dumps(previewed)) == planned(command_line, config, "--gpus", "3")
    assert command_line("plan", config, "--strict")[0] == 1
    code, out, _ = command_line("doctor", config, "--json")
    (finding,) = json.loads(out)["sections"][0]["findings"]
    assert (code, finding["code"], len(finding["names"])) == (1, "left-out", 1)


def test_its_table_of_options_is_obeyed(room, config, command_line):
    before = planned(command_line, config)
    config.write_text(f"{config.read_text()}[kohya_bucket]\nremainder = 'pad'\n", encoding="utf-8")
    after = planned(command_line, config)
    assert sum(row["short_batches"] for row in before["datasets"][0]["buckets"]) > 0
    assert {row["short_batches"] for row in after["datasets"][0]["buckets"]} == {0}


@pytest.mark.parametrize("command", [("analyze", "--config"), ("simulate", "9x9", "--config"), ("explore",)])
def test_commands_that_it_has_no_answer_for_say_so(room, config, command_line, command):
    code, _, err = command_line(*command, config)
    assert (code, err.count("\n")) == (2, 1)
    assert "is a config of the toy trainer, and" in err
    assert err.endswith("plan and doctor take this one\n")


def test_what_it_cannot_be_asked_is_refused(room, config, command_line):
    for option in ("--arch", "--resolution", "--sd-scripts"):
        assert f"leave out {option}" in command_line("plan", config, option, "512")[2]


@pytest.mark.slow
def test_what_is_launched_is_what_was_planned(room, config, command_line, tmp_path):
    package = tmp_path / "checkout" / "toys"
    package.mkdir(parents=True)
    shutil.copy(HERE / "toy_trainer.py", package / "trainer.py")
    (package.parent / "train_toys.py").write_text(PROGRAM, encoding="utf-8")
    paths = os.pathsep.join([str(package.parent), str(HERE.parents[2])])

    def trained(*launcher):
        command = [sys.executable, *launcher, str(package.parent / "train_toys.py"), str(tmp_path / "images")]
        environment = {**os.environ, "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    asked = collections.Counter(f"{i}.png" for i in range(23))
    steps = trained("-c", LAUNCH + "l.main()", str(room))
    for epoch in range(2):
        assert collections.Counter(name for number, names, _ in steps if number == epoch for name in names) == asked
    shapes = collections.Counter()
    for number, names, (height, width) in steps:
        shapes[width * 8, height * 8] += len(names) * (number == 0)
    (data,) = planned(command_line, config)["datasets"]
    assert shapes == {tuple(row["bucket"]): row["samples"] for row in data["buckets"]}
    assert len({tuple(shape) for _, _, shape in trained()}) == 2 < len(shapes)  # alone it has buckets of its own


def test_an_activated_environment_knows_it(room, tmp_path):
    (tmp_path / "site").mkdir()
    write(tmp_path / "site")
    text = (tmp_path / "site" / "_kohya_bucket_at_start.py").read_text(encoding="utf-8")
    assert "('toys', 'toy_trainer', ('../train_toys.py', 'trainer.py'))" in text
    compile(text, "at_start", "exec")
