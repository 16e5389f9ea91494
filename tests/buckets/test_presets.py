"""Bundled sets and sets in files."""

import json

import pytest

from kohya_bucket import BucketSet, ConfigError, KohyaBuckets, list_presets, load_preset
from kohya_bucket.buckets import bucket_set_to_toml, load_from_json, load_from_toml
from kohya_bucket.errors import InvalidBucketError

PAGE_EXAMPLE = """
# my_buckets.toml
name = "my-budget"
vae_factor = 8
[[buckets]]
width = 768
height = 768
[[buckets]]
width = 896
height = 640
[[buckets]]
width = 640
height = 896
"""


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_can_be_trained(name) -> None:
    bucket_set = load_preset(name)
    assert bucket_set.name == name
    assert bucket_set.description
    assert bucket_set.vae_factor in (16, 64)
    transposes = {(b.height, b.width) for b in bucket_set}
    missing = transposes - {b.as_tuple() for b in bucket_set}
    assert missing == ({(704, 1344)} if name == "sdxl-report" else set())


def test_the_presets_are_what_they_say() -> None:
    assert {"sdxl", "sd15", "novelai", "sdxl-1024", "flux", "sd3", "qwen-image"} <= set(list_presets())
    assert load_preset("sdxl-1024").buckets == KohyaBuckets(1024, 256, 2048).bucket_set.buckets
    assert set(load_preset("sd15")) < set(KohyaBuckets(512).bucket_set)
    assert set(load_preset("sdxl")) < set(load_preset("sdxl-report"))
    assert len(load_preset("sdxl-report")) == 40
    with pytest.raises(ConfigError, match="preset is 'sdx'"):
        load_preset("sdx")


def test_files_round_trip(tmp_path) -> None:
    toml_file, json_file = tmp_path / "my_buckets.toml", tmp_path / "my.json"
    toml_file.write_text(PAGE_EXAMPLE, encoding="utf-8")
    bucket_set = load_from_toml(toml_file)
    assert [str(b) for b in bucket_set] == ["768x768", "896x640", "640x896"]
    assert (bucket_set.name, bucket_set.vae_factor) == ("my-budget", 8)
    json_file.write_text(json.dumps({"buckets": [{"width": 8, "height": 16}]}), encoding="utf-8")
    assert load_from_json(str(json_file)) == BucketSet.from_dims([(8, 16)])
    odd = BucketSet.from_dims([(640, 512)], name='a "name"', description="C:\\sets\\ä = [x]", vae_factor=64)
    toml_file.write_text(bucket_set_to_toml(odd), encoding="utf-8")
    assert load_from_toml(toml_file) == odd


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("[[buckets]]\nwidth = 8\nheight = 8\n[[buckets]]\nwidth = 8\nheight = 8", InvalidBucketError, "8x8 twice"),
        ("buckets = []", InvalidBucketError, "is empty"),
        (
            "vae_factor = 64\n[[buckets]]\nwidth = 100\nheight = 64",
            InvalidBucketError,
            "100x64 is not a multiple of 64",
        ),
        ("[[buckets]]\nwidth = 0\nheight = 64", InvalidBucketError, "0x64: width is 0"),
        ("[[buckets]]\nwidth = -8\nheight = 64", InvalidBucketError, "-8x64: width is -8"),
        ("[[buckets]]\nwidth = 8.5\nheight = 64", InvalidBucketError, "bucket 1 is 8.5x64, .* whole numbers"),
        ("vae_factor = 0\n[[buckets]]\nwidth = 8\nheight = 64", InvalidBucketError, "vae_factor is 0"),
        ('name = "x"', ConfigError, "has no \\[\\[buckets\\]\\]"),
        ("[[buckets]]\nwidth = 8", ConfigError, "bucket 1 is .* must have exactly width and height"),
        ("step = 8\nbuckets = []", ConfigError, "key 'step', which does not exist"),
        ("name = 3\nbuckets = []", ConfigError, "name is 3, but must be a str"),
        ("name = ", ConfigError, "not valid TOML"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(tmp_path, text, error, message) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message) as caught:
        load_from_toml(path)
    assert "bad.toml" in str(caught.value)


def test_a_json_file_that_is_none(tmp_path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("[1, 2", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_from_json(path)
    path.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds a list"):
        load_from_json(path)


@pytest.mark.parametrize("load", [load_from_toml, load_from_json])
def test_a_file_that_is_no_text_is_named(tmp_path, load) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(ConfigError, match=r"photo\.png is not UTF-8 text .* is it the right file\?"):
        load(path)


@pytest.mark.parametrize("load", [load_from_toml, load_from_json])
def test_a_folder_is_no_bucket_set(tmp_path, load) -> None:
    with pytest.raises(ConfigError, match="is a folder, but a bucket set is a TOML or JSON file"):
        load(tmp_path)


def test_a_side_that_stands_twice_is_refused(tmp_path) -> None:
    path = tmp_path / "set.json"
    path.write_text('{"buckets": [{"width": 64, "width": 128, "height": 64}]}', encoding="utf-8")
    with pytest.raises(ConfigError, match="'width' stands twice in one object"):
        load_from_json(path)
