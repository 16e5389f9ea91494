"""Families that the code of a checkout defines and no table here has."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kohya_bucket.buckets.trainers import MusubiTunerBuckets
from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.musubi.architectures import ARCHITECTURES
from kohya_bucket.trainers.musubi.families import architecture_named, defined_in, family_of
from tests.command_line import command_line
from tests.pictures import make_pictures

__all__ = ["command_line"]

NAMES = ("qi21", "ltx2", "kr2e", "ei", "mf")

OF_IMAGES = """        elif self.architecture in (None, {constant}):
            control_count_per_image = {controls}
"""
OF_CLIPS = """        elif self.architecture == {constant} or not self:
            self.target_fps = asked if asked is not None else VideoDataset.{constant}_FPS
            self.vae_frame_stride = {grid[0]}
            self.vae_frame_base = {grid[1]}
"""
DATA_SETS = """class ImageDataset:
    def __init__(self):
        control_count_per_image: int = 1
        if not self:
            control_count_per_image = 7
{images}class VideoDataset:
{rates}    def __init__(self, asked):
        self.vae_frame_stride = 4
        if not self:
            self.target_fps = 3.0
{clips}{special}"""


def drawn(seed: int) -> dict[str, dict[str, Any]]:
    """What a checkout defines, by name."""
    draws = random.Random(seed)
    return {
        name: {
            "steps": draws.choice((8, 16, 32, 64)), "target_fps": draws.choice((None, 16.0, 25.0)),
            "grid": draws.choice(((4, 1), (8, 1), (17, 5))), "controls": draws.choice((1, 2, None)),
            "plain": draws.random() < 0.5,
        }
        for name in NAMES
    }  # fmt: skip


def write_checkout(folder: Path, known: dict[str, dict[str, Any]], in_one_file: bool = False) -> Path:
    """A checkout with no more code than what says so; its package."""
    package = folder / "src" / "musubi_tuner"
    (package / "dataset").mkdir(parents=True)
    said = [{"constant": f"ARCHITECTURE_MODEL_{name.upper()}", "name": name, **one} for name, one in known.items()]

    def each(text: str, wanted: Callable[[Any], bool] = lambda _: True) -> str:
        return "".join(text.format(**one) for one in said if wanted(one))

    steps = "class BucketSelector:\n    ARCHITECTURE_STEPS_MAP = {" + each("{constant}: STEPS_{name}, ") + "}\n"
    special = each("    def {name}(self):\n        return self.kind == {constant}\n", lambda one: not one["plain"])
    parts = {
        "architectures": each('{constant} = "{name}"\n{constant}_FULL = "model_{name}"\n'),
        "bucket": each("STEPS_{name} = {steps}\n") + steps,
        "image_video_dataset": DATA_SETS.format(
            images=each(OF_IMAGES, lambda one: one["controls"] != 1), rates=each("    {constant}_FPS = {target_fps}\n"),
            clips=each(OF_CLIPS, lambda one: one["target_fps"]), special=special,
        ),
    }  # fmt: skip
    if in_one_file:
        parts = {"image_video_dataset": "".join(parts.values())}
    parts["config_utils"] = 'SCHEMA = {"datasets": 1, "image_directory": str, Optional("loudness"): float}\n'
    for file, text in parts.items():
        (package / "dataset" / f"{file}.py").write_text(text, encoding="utf-8")
    for one in said:
        trains = "class Trainer:\n    def architecture(self):\n        return {constant}\n".format(**one)
        (package / f"{one['name']}_train_network.py").write_text(trains, encoding="utf-8")
        asks = "generate(config, architecture={constant})\n".format(**one)
        (package / f"{one['name']}_cache_latents.py").write_text(asks, encoding="utf-8")
    return package


@pytest.mark.parametrize("seed", range(20))
def test_what_the_code_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    known = drawn(seed)
    package = write_checkout(tmp_path, known, in_one_file=seed % 2 == 1)
    assert defined_in(package).keys() == known.keys()
    monkeypatch.chdir(tmp_path)
    for name, said in known.items():
        family = architecture_named(name)
        assert {key: getattr(family, key) for key in ("steps", "target_fps", "controls", "plain")} == {
            key: value for key, value in said.items() if key != "grid"
        }
        expected = said["grid"] if said["target_fps"] is not None else (4, 1)
        assert (family.grid.stride, family.grid.base) == expected
        assert (family.full_name, family.latents) == (f"model_{name}", f"{name}_cache_latents")
        assert family.text == "…_cache_text_encoder_outputs"
        monkeypatch.chdir(Path(__file__).parent)
        assert architecture_named(str(package / f"{name}_train_network.py")).name == name
        monkeypatch.chdir(tmp_path)
        assert architecture_named(f"model-{name}") == family == family_of(name, package)
    (package / f"{name}_train_network.py").rename(package / "zebra_train_network.py")
    defined_in.cache_clear()
    assert architecture_named("zebra").name == name


@pytest.mark.posix("links of POSIX")
def test_a_checkout_that_is_open_in_an_editor(tmp_path: Path) -> None:
    package = write_checkout(tmp_path, drawn(0))
    for folder in (package, package / "dataset"):
        (folder / ".#bucket.py").symlink_to("somebody@somewhere.1234")
    assert defined_in(package).keys() == set(NAMES)


def test_the_table_comes_first(tmp_path: Path) -> None:
    package = write_checkout(tmp_path, {"wan": drawn(0)["ltx2"]})
    assert family_of("wan", package) is ARCHITECTURES["wan"]


def test_no_checkout_and_code_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="name its trainer's path, or run this in its folder"):
        architecture_named("qi21")
    package = write_checkout(tmp_path, drawn(1))
    with pytest.raises(ConfigError, match="musubi_tuner defines none of that name"):
        architecture_named("qi22")
    (package / "dataset" / "bucket.py").write_text("class {", encoding="utf-8")
    defined_in.cache_clear()
    with pytest.raises(ConfigError, match=r"bucket\.py cannot be read"):
        architecture_named("qi21")


DEEP = {
    "sums": "x = 1" + "+1" * 20_000,
    "brackets": "x = " + "(" * 5_000,
    "choices": "x = " + "1 if y else " * 5_000 + "1",
}


@pytest.mark.parametrize("kind", [*DEEP, "elif", "sparse"])
def test_code_that_is_nested_deeply_or_endless_ends_in_one_line_or_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any, kind: str
) -> None:
    package = write_checkout(tmp_path, drawn(1))
    file = package / "dataset" / "architectures.py"
    if kind == "sparse":
        with open(file, "r+b") as opened:
            opened.truncate(20 << 30)
    elif kind == "elif":
        chain = "        if a == 0:\n            pass\n" + "        elif a == 1:\n            pass\n" * 500
        body = f"class ImageDataset:\n    def __init__(self):\n{chain}"
        (package / "dataset" / "more.py").write_text(body, encoding="utf-8")
    else:
        file.write_text(file.read_text(encoding="utf-8") + DEEP[kind], encoding="utf-8")
    (tmp_path / "c.toml").write_text("[[datasets]]\nimage_directory = 'im'\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    defined_in.cache_clear()
    for command in ("plan", "doctor"):
        code, out, error = command_line(command, "c.toml", "--arch", "qi21")
        assert code in (1, 2)
        assert "Traceback" not in out + error
        assert len(error.splitlines()) <= 1


@pytest.mark.parametrize("value", ["'four'", "0.5", "True", "1_000_000_000"])
def test_a_family_of_impossible_numbers_is_left_out(tmp_path: Path, value: str) -> None:
    package = write_checkout(tmp_path, drawn(0))
    (file,) = [f for f in (package / "dataset").glob("*.py") if "vae_frame_stride = " in f.read_text(encoding="utf-8")]
    text = file.read_text(encoding="utf-8")
    file.write_text(re.sub(r"vae_frame_stride = \S+", f"vae_frame_stride = {value}", text), encoding="utf-8")
    assert defined_in(package).keys() < set(NAMES)


def test_a_config_of_each_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Any) -> None:
    """At the steps of its code; what is not known is said, and keys that the code takes stop nothing."""
    known, sizes = drawn(2), [(1024, 768), (700, 1100), (640, 640), (1920, 1080)]
    write_checkout(tmp_path, known)
    make_pictures(tmp_path / "im", sizes, "a caption")
    lines = ["[general]", "resolution = [768, 512]", "enable_bucket = true", 'caption_extension = ".txt"']
    lines += ["[[datasets]]", "loudness = 0.5", 'image_directory = "im"', 'cache_directory = "cache"']
    (tmp_path / "c.toml").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, said in known.items():
        code, out, _ = command_line("plan", "c.toml", "--arch", name, "--json")
        assert code == 0
        plan = json.loads(out)
        buckets = MusubiTunerBuckets((768, 512), said["steps"]).place(sizes).bucket_sizes.tolist()
        rows = plan["datasets"][0]["buckets"]
        assert sorted(row["bucket"] for row in rows for _ in range(row["items"])) == sorted(buckets)
        texts = [finding["message"] for finding in plan["findings"]]
        assert any(text.startswith(f"model-{name} is read from ") and "Not known: " in text for text in texts)
        assert any("left to musubi-tuner" in text for text in texts) != said["plain"]
        assert any(text.startswith("loudness: known to the musubi-tuner at hand") for text in texts)
