"""Every preset and saved setting in a checkout of the kohya_ss GUI (KOHYA_SS_DIR) is read as the GUI means it."""

import json
import os
from pathlib import Path

import pytest
from sdscripts_support import write_images

from kohya_bucket.trainers.sdscripts.config import read_config


def presets():
    root = os.environ.get("KOHYA_SS_DIR")
    folders = [Path(root, name) for name in ("presets", "test/config")] if root else []
    files = [file for folder in folders for file in sorted(folder.rglob("*.json"))]
    return [file for file in files if "max_resolution" in file.read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gui")
    write_images(folder / "10_cat", [(300, 400), (500, 300)])
    return folder


@pytest.mark.parametrize("file", presets() or [None], ids=lambda file: file.name if file else "none")
def test_a_preset(file, images):
    if file is None:
        pytest.skip("KOHYA_SS_DIR is not set: no checkout of the kohya_ss GUI to read presets of")
    saved = json.loads(file.read_text(encoding="utf-8"))
    fine_tuning = "dataset_repeats" in saved
    read = read_config(file, {"train_data_dir": str(images)})
    (dataset,) = read.datasets
    if saved["max_resolution"]:
        sides = [int(side) for side in saved["max_resolution"].split(",")]
        assert dataset.config.resolution == (sides[0], sides[-1])
    assert dataset.config.enable_bucket == (bool(saved.get("enable_bucket")) or fine_tuning)
    assert dataset.config.batch_size == int(saved.get("train_batch_size") or 1)
    for key, usual in (("min_bucket_reso", 256), ("max_bucket_reso", 1024), ("bucket_reso_steps", 64)):
        assert getattr(dataset.config, key) == int(saved.get(key) or usual)
    assert dataset.config.bucket_no_upscale == bool(saved.get("bucket_no_upscale"))
    if saved.get("sdxl"):
        assert read.programs.family == "sdxl"
