"""The captions that a config's latents are stored with are those that sd-scripts would train."""

import json
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.latents.items import EncodeOptions
from kohya_bucket.trainers.sdscripts.config import Severity, read_config
from kohya_bucket.trainers.sdscripts.wanted_latents import wanted_by_config

CONFIG = "[[datasets]]\nresolution = 512\nenable_bucket = true\n[[datasets.subsets]]\nimage_dir = 'data'\n{}\n"


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def stored(subset: str = "") -> dict[str, str | None]:
    Path("c.toml").write_text(CONFIG.format(subset), encoding="utf-8")
    read = read_config("c.toml")
    parts = wanted_by_config(read, EncodeOptions("vae"), Path.cwd())
    return {Path(p).name: c for part in parts for p, c in zip(part.paths, part.captions or [], strict=True)}


def image(name: str, caption: bytes | None = None, of: str = "") -> None:
    Image.new("RGB", (300, 300)).save(Path("data") / f"{name}.png")
    if caption is not None:
        (Path("data") / f"{of or name}.caption").write_bytes(caption)


def test_the_first_line_or_every_one_that_is_not_blank() -> None:
    image("a", b" one \r\n\ntwo\n")
    image("b")
    image("face_1_2_3_4", b"a face", of="face")
    assert stored("class_tokens = 'cat'") == {"a.png": "one", "b.png": "cat", "face_1_2_3_4.png": "a face"}
    assert stored("enable_wildcard = true")["a.png"] == "one\ntwo"


@pytest.mark.parametrize(("caption", "why"), [("grün".encode("latin-1"), "not in UTF-8"), (b"", "it is empty")])
def test_a_caption_at_which_sd_scripts_stops_is_named(caption: bytes, why: str) -> None:
    image("a", b"fine")
    image("b", caption)
    assert stored("class_tokens = 'cat'") == {"a.png": "fine", "b.png": "cat"}
    (error,) = read_config("c.toml").findings.of(Severity.ERROR)
    assert [Path(name).name for name in error.names] == ["b.caption"]
    assert why in error.message


def test_captions_of_metadata(workplace: Path) -> None:
    for name in "abc":
        image(name, b"not read")
    entries = {"a.png": {"caption": "one", "tags": "x, y"}, "b.png": {"tags": "z"}, "c.png": {"caption": "three"}}
    Path("meta.json").write_text(json.dumps(entries), encoding="utf-8")
    expected = {"a.png": "one,x, y", "b.png": "z", "c.png": "three"}
    assert stored("metadata_file = 'meta.json'") == expected
    assert stored("metadata_file = 'meta.json'\nenable_wildcard = true")["c.png"] == "three"


def test_captions_that_cache_info_noted(workplace: Path) -> None:
    image("a", "grün".encode("latin-1"))
    noted = {str(Path("data", "a.png")): {"caption": "noted", "resolution": [300, 300]}}
    (workplace / "metadata_cache.json").write_text(json.dumps(noted), encoding="utf-8")
    assert stored("cache_info = true") == {"a.png": "noted"}
