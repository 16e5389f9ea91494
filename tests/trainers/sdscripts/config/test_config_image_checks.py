"""Sizes that do not fit together are named."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.images import read_sizes
from kohya_bucket.trainers.sdscripts.config import Finding, Severity, read_config
from kohya_bucket.trainers.sdscripts.plan import check_images


def picture(path: Path, size: tuple[int, int]) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", size).save(path)


def checked(text: str) -> list[Finding]:
    Path("config.toml").write_text(text, encoding="utf-8")
    config = read_config("config.toml", check_captions=False)
    dataset = config.datasets[0]
    stated = dataset.images.stated_sizes
    sizes = np.where(stated > 0, stated, read_sizes(dataset.images.paths).sizes)
    before = len(config.findings)
    check_images(dataset, sizes, config.findings)
    return list(config.findings)[: len(config.findings)] if len(config.findings) > before else []


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "set" / "a.png", (100, 50))
    picture(tmp_path / "set" / "b.png", (64, 64))


HEAD = (
    "[[datasets]]\nresolution = 64\nenable_bucket = true\nmin_bucket_reso = 64\n[[datasets.subsets]]\n"
    "image_dir = 'set'\n"
)


STATED = [("a", [100, 50]), ("b", [128, 64])]


def test_sizes_that_metadata_states_wrongly() -> None:
    Path("meta.json").write_text(
        json.dumps({f"{name}.png": {"image_size": size, "caption": "x"} for name, size in STATED}), encoding="utf-8"
    )
    (finding,) = checked(HEAD + "metadata_file = 'meta.json'\n")
    assert (finding.code, finding.names) == ("stated-size", ("b.png",))
    assert "b.png: 128x64 stated, 64x64 in fact" in finding.message


def test_unreadable_files_behind_stated_sizes() -> None:
    Path("set/b.png").write_bytes(b"")
    Path("meta.json").write_text(json.dumps({"b.png": {"image_size": [64, 64], "caption": "x"}}), encoding="utf-8")
    (finding,) = checked(HEAD + "metadata_file = 'meta.json'\n")
    assert (finding.code, finding.severity) == ("unreadable-image", Severity.ERROR)


def test_control_images_of_another_size() -> None:
    picture(Path("control/a.png"), (100, 50))
    picture(Path("control/b.png"), (64, 32))
    (finding,) = checked(HEAD + "conditioning_data_dir = 'control'\n")
    assert finding.code == "control-size"
    assert "64x32, its image 64x64" in finding.message


def test_images_of_another_size_without_buckets() -> None:
    findings = checked(HEAD.replace("enable_bucket = true\n", ""))
    (finding,) = [f for f in findings if f.code == "not-this-size"]
    assert finding.message.startswith("1 image with a different size than 64x64")
    assert checked(HEAD) == []
