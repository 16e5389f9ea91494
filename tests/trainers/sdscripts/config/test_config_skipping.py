"""`skip_image_resolution`: which images are left out, at which point, and what is said about it."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.trainers.sdscripts.config import Config, Finding, Severity, read_config, read_folders

SIZES = {"a": (64, 64), "b": (32, 128), "c": (65, 64), "d": (300, 20), "e": (100, 100)}  # 4096 pixels: a and b


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pictures("set", SIZES)


def pictures(folder: str, sizes: dict[str, tuple[int, int]]) -> None:
    Path(folder).mkdir(exist_ok=True)
    for name, size in sizes.items():
        Image.new("RGB", size).save(Path(folder) / f"{name}.png")
        (Path(folder) / f"{name}.txt").write_text("a caption", encoding="utf-8")


def read(subsets: str = "image_dir = 'set'\ncaption_extension = '.txt'\n", keys: str = "") -> Config:
    text = (
        "[[datasets]]\nresolution = 64\nenable_bucket = true\nmin_bucket_reso = 64\nskip_image_resolution = 64\n"
        f"{keys}\n[[datasets.subsets]]\n{subsets}"
    )
    Path("config.toml").write_text(text, encoding="utf-8")
    return read_config("config.toml")


def names(config: Config) -> str:
    """The images, one letter each."""
    return "".join(Path(key).stem for key in config.datasets[0].images.keys)


def skipped(config: Config) -> dict[str, str]:
    return {Path(key).stem: reason for key, reason in config.datasets[0].images.skipped}


def found(config: Config, code: str) -> Finding:
    (finding,) = [f for f in config.findings if f.code == code]
    return finding


def test_images_of_as_many_pixels_are_left_out_and_named() -> None:
    config = read()
    assert names(config) == "cde"
    assert skipped(config) == {
        "a": "64x64: no more pixels than skip_image_resolution 64x64",
        "b": "32x128: no more pixels than skip_image_resolution 64x64",
    }
    assert not len(config.findings)


def test_width_and_height_and_each_data_set_its_own() -> None:
    text = (
        "[general]\nresolution = 64\nenable_bucket = true\nmin_bucket_reso = 64\nskip_image_resolution = [20, 300]\n"
        "[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'set'\ncaption_extension = '.txt'\n"
        "[[datasets]]\nskip_image_resolution = [1, 1]\n"
        "[[datasets.subsets]]\nimage_dir = 'set'\ncaption_extension = '.txt'\n"
    )
    Path("config.toml").write_text(text, encoding="utf-8")
    config = read_config("config.toml", {"skip_image_resolution": "900"})
    assert [len(dataset.images) for dataset in config.datasets] == [1, 5]
    assert skipped(config)["d"] == "300x20: no more pixels than skip_image_resolution 20x300"


def test_the_command_line_counts_for_folders() -> None:
    Path("train").mkdir()
    Path("set").rename("train/3_thing")
    options = {"resolution": "64", "skip_image_resolution": "64,64", "caption_extension": ".txt"}
    config = read_folders("train", None, options)
    assert (names(config), sorted(skipped(config))) == ("cde", ["a", "b"])


def test_captions_and_stems_of_skipped_images_are_nobodys_business() -> None:
    Path("set/a.txt").write_bytes(b"")
    Image.new("RGB", (8, 8)).save("set/e.jpg")
    assert not len(read().findings)


def test_images_are_left_out_before_some_are_held_back() -> None:
    keys = "validation_split = 0.34\nvalidation_seed = 1"
    config = read(keys=keys)
    validation = config.datasets[0].validation
    assert validation is not None
    parts = {Path(key).stem for key in (*config.datasets[0].images.keys, *validation.keys)}
    assert (len(config.datasets[0].images), len(validation), parts) == (2, 1, {"c", "d", "e"})


def test_regularization_is_left_out_and_counted_alike() -> None:
    pictures("reg", {"r": (64, 64), "s": (90, 90), "t": (80, 80)})
    regular = "[[datasets.subsets]]\nimage_dir = 'reg'\nis_reg = true\ncaption_extension = '.txt'\n"
    config = read("image_dir = 'set'\ncaption_extension = '.txt'\n" + regular)
    assert names(config) == "cdest"
    assert config.datasets[0].images.repeats.tolist() == [1, 1, 1, 2, 1]


def test_the_sizes_in_a_metadata_cache_decide_and_are_not_believed_beyond() -> None:
    entries = {os.path.join("set", f"{name}.png"): {"caption": name, "resolution": [64, 64]} for name in "ace"}
    entries[os.path.join("set", "c.png")]["resolution"] = [640, 64]
    cache = Path("set/metadata_cache.json")
    cache.write_text(json.dumps(entries), encoding="utf-8")
    config = read("image_dir = 'set'\ncache_info = true\n")
    assert (names(config), sorted(skipped(config))) == ("c", ["a", "e"])
    # b is too small to be missed, d is not
    assert found(config, "stale-cache").names == (os.path.join("set", "d.png"),)
    os.utime(cache, (1, 1))  # as if c.png were edited since
    config = read("image_dir = 'set'\ncache_info = true\n")
    assert (names(config), config.datasets[0].images.stated_sizes.tolist()) == ("c", [[0, 0]])


def test_a_cache_that_sd_scripts_would_write_lists_what_is_left() -> None:
    subset = "image_dir = 'set'\ncache_info = true\ncaption_extension = '.txt'\n"
    read(subset)
    text = Path("config.toml").read_text(encoding="utf-8")
    second = text.replace("skip_image_resolution = 64\n", "")
    Path("config.toml").write_text(text + second, encoding="utf-8")
    assert [len(dataset.images) for dataset in read_config("config.toml").datasets] == [3, 3]
    assert not Path("set/metadata_cache.json").exists()


@pytest.mark.parametrize("name", ["meta.json", "meta.jsonl"])
def test_sizes_that_metadata_states_decide(name: str) -> None:
    entries = {"a.png": [640, 64], "b.png": [32, 128], "e.png": None, "d.png": None, "gone.png": [10, 10]}
    lines = [{"image_path": key, "caption": "x"} | ({"image_size": s} if s else {}) for key, s in entries.items()]
    if name == "meta.json":
        Path(name).write_text(json.dumps({line.pop("image_path"): line for line in lines}), encoding="utf-8")
    else:
        Path(name).write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    config = read(f"image_dir = 'set'\nmetadata_file = '{name}'\n")
    assert (names(config), skipped(config)) == (
        "aed",
        {
            "b": "32x128: no more pixels than skip_image_resolution 64x64",
            "gone": "10x10: no more pixels than skip_image_resolution 64x64",
        },
    )
    assert "missing-image" not in [f.code for f in config.findings]  # it is not looked for


def test_metadata_of_images_that_are_gone() -> None:
    Path("meta.json").write_text(json.dumps({"gone.png": {"caption": "x"}}), encoding="utf-8")
    config = read("image_dir = 'set'\nmetadata_file = 'meta.json'\n")
    assert found(config, "missing-image").names == ("gone.png",)
    assert "unreadable-image" not in [f.code for f in config.findings]


def test_what_cannot_be_read_is_left_out_and_warned_of() -> None:
    Path("set/e.png").write_bytes(b"")
    config = read()
    assert names(config) == "cd"
    assert "empty" in skipped(config)["e"]
    finding = found(config, "unreadable-image")
    assert finding.severity is Severity.WARNING
    assert finding.names == (f"{os.path.join('set', 'e.png')}: {skipped(config)['e']}",)
    assert "1 image cannot be read, and with skip_image_resolution sd-scripts leaves such images out" in finding.message


def test_nothing_left_of_a_subset() -> None:
    pictures("small", {"x": (10, 10)})
    both = "image_dir = 'set'\ncaption_extension = '.txt'\n[[datasets.subsets]]\n"
    config = read(both + "image_dir = 'small'\ncaption_extension = '.txt'\n")
    finding = found(config, "all-skipped")
    assert (finding.severity, finding.where[-8:]) == (Severity.WARNING, "subset 2")
    assert "skip_image_resolution 64x64" in finding.message
    held_back = "validation_split = 0.5\nvalidation_seed = 1"
    config = read(both + "image_dir = 'small'\ncaption_extension = '.txt'\n", held_back)
    assert found(config, "all-skipped").severity is Severity.ERROR
    config = read("image_dir = 'small'\ncaption_extension = '.txt'\n")
    assert found(config, "no-images").severity is Severity.ERROR


def test_control_images_of_skipped_images_are_no_mistake() -> None:
    pictures("control", SIZES)
    config = read("image_dir = 'set'\nconditioning_data_dir = 'control'\ncaption_extension = '.txt'\n")
    assert names(config) == "cde"
    assert {finding.severity for finding in config.findings} <= {Severity.NOTE}
