"""What versions of sd-scripts read differently in metadata and ControlNet pairs."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.trainers.sdscripts.config import Config, Finding, Release, Severity, read_config


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("set/a.png", "set/b.jpg", "set/b.PNG", "set/c.1.webp"):
        picture(path)


def picture(path: str) -> None:
    Path(path).parent.mkdir(exist_ok=True)
    Image.new("RGB", (64, 64)).save(path)


def read(subset: str, version: str = "main", keys: str = "") -> Config:
    text = f"[[datasets]]\nresolution = 64\nenable_bucket = true\nmin_bucket_reso = 64\n{keys}\n[[datasets.subsets]]\n"
    Path("config.toml").write_text(text + subset, encoding="utf-8")
    return read_config("config.toml", release=Release.from_version(version), check_captions=False)


def found(config: Config, code: str) -> list[Finding]:
    return [f for f in config.findings if f.code == code]


METADATA = "image_dir = 'set'\nmetadata_file = 'meta.json'\n"


@pytest.mark.posix("letter case does not count there")
def test_keys_that_name_no_file_are_looked_up_since_0_10_6() -> None:
    keys = ["a", "b", "c.1", str(Path("set/a").resolve()), "a.png", "gone", "gone.png"]
    Path("meta.json").write_text(json.dumps({key: {"caption": "x"} for key in keys}), encoding="utf-8")
    config = read(METADATA)
    images = config.datasets[0].images
    paths = dict(zip(images.keys, images.paths, strict=True))
    assert [os.path.basename(paths[key]) for key in keys] == [
        "a.png", "b.PNG", "c.1.webp", "a.png", "a.png", "gone", "gone.png",
    ]  # fmt: skip
    assert set(found(config, "missing-image")[0].names) == {"gone", "gone.png"}
    old = read(METADATA, "0.10.5")
    assert set(found(old, "missing-image")[0].names) == set(keys) - {"a.png"}
    Path("meta.json").write_text(json.dumps({"a": {"caption": "x"}}), encoding="utf-8")
    (finding,) = found(read(METADATA, "0.10.5"), "missing-image")
    assert finding.remedy == "the keys have no extension; sd-scripts needs the whole file name before 0.10.6"


def test_width_and_height_of_a_line_are_its_size_since_0_10_6() -> None:
    lines = [
        {"image_path": "a.png", "width": 64, "height": 64, "image_size": [9, 9]},
        {"image_path": "b.jpg", "width": 5},
    ]
    Path("meta.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    subset = METADATA.replace("json", "jsonl")
    assert read(subset).datasets[0].images.stated_sizes.tolist() == [[64, 64], [0, 0]]
    assert read(subset, "v0.10.5").datasets[0].images.stated_sizes.tolist() == [[9, 9], [0, 0]]
    Path("meta.jsonl").write_text('{"image_path": "a.png", "width": "64", "height": 64}', encoding="utf-8")
    assert "the image_size of 'a.png' is ['64', 64]" in found(read(subset), "broken-metadata")[0].message


def test_tags_without_a_caption_are_trained_after_0_11_1() -> None:
    entries = {
        "a.png": {"tags": "t"},
        "b.jpg": {"tags": "t", "caption": " \n"},
        "c.1.webp": {"tags": "t", "caption": "x"},
    }
    Path("meta.json").write_text(json.dumps(entries), encoding="utf-8")
    wildcards = METADATA + "enable_wildcard = true\n"
    for version, alone in (("main", "t"), ("0.11.1", "")):
        images = read(wildcards, version).datasets[0].images
        assert dict(zip(images.keys, images.captions, strict=True)) == {
            "a.png": alone,
            "b.jpg": alone,
            "c.1.webp": "x,t",
        }


def test_control_images_to_spare_stop_it_before_0_10_2() -> None:
    for name in ("a", "b", "c.1", "spare"):
        picture(f"control/{name}.png")
    pairs = "image_dir = 'set'\nconditioning_data_dir = 'control'\n"
    (old,) = found(read(pairs, "0.10.1"), "extra-control-image")
    assert old.severity is Severity.ERROR
    assert old.names == (os.path.join("control", "spare.png"),)
    assert not found(read(pairs, "0.10.2"), "extra-control-image")
    split = read(pairs, keys="validation_split = 0.5\nvalidation_seed = 1")
    assert "validates on those that it trains" in found(split, "validation-split")[0].message


def test_a_cache_of_a_part_is_warned_of() -> None:
    subset, keys = "image_dir = 'set'\ncache_info = true\n", "validation_split = 0.5\nvalidation_seed = 1"
    assert "captions of others" in found(read(subset, "0.10.1", keys), "cache-and-split")[0].message
    assert "later runs train a part of that part" in found(read(subset, keys=keys), "cache-and-split")[0].message
    images = {os.path.join("set", name): {"caption": "", "resolution": [64, 64]} for name in os.listdir("set")}
    Path("set/metadata_cache.json").write_text(json.dumps(images), encoding="utf-8")
    assert not found(read(subset, keys=keys), "cache-and-split")
