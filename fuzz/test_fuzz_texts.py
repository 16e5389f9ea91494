"""Bucket sets, dataset configs, tables of sizes: read, or refused with one clear error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzz.mutations import mutated, read_or_refused
from kohya_bucket.buckets import load_from_json, load_from_toml
from kohya_bucket.images.size_table import read_size_table
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.sdscripts.config import read_config

SET = b"name = 'x'\nvae_factor = 8\n[[buckets]]\nwidth = 512\nheight = 768\n[[buckets]]\nwidth = 640\nheight = 512\n"
CONFIG = b"""[general]
enable_bucket = true
shuffle_caption = true
[[datasets]]
resolution = [512, 768]
batch_size = 2
skip_image_resolution = 64
  [[datasets.subsets]]
  image_dir = 'nowhere'
  num_repeats = 2
  caption_extension = ".txt"
  [[datasets.subsets]]
  metadata_file = 'nowhere.json'
[kohya_bucket]
rule = "auto"
num_buckets = 4
resolutions = [512, [640, 768]]
max_crop = 0.5
"""
ROWS = [(1, 512, 768), (2, 640, 480), (70000, 1, 20000)]
TABLES = {
    ".csv": "id,width,height\n" + "".join(f"{i},{w},{h}\n" for i, w, h in ROWS),
    ".json": json.dumps([{"id": i, "width": w, "height": h} for i, w, h in ROWS]),
}
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5),
              st.sampled_from([0, -1, 2**31, 10**30, "kohya", "512,512", "auto"])),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder, in which configs look for theirs."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("fuzz"))
    yield Path.cwd()
    os.chdir(before)


@given(text=mutated(SET))
def test_bucket_sets(folder: Path, text: bytes) -> None:
    (folder / "set.toml").write_bytes(text)
    read_or_refused(load_from_toml, folder / "set.toml")


@given(content=st.one_of(values, st.fixed_dictionaries({"buckets": values}, optional={"vae_factor": values})))
def test_bucket_sets_in_json(folder: Path, content: object) -> None:
    (folder / "set.json").write_text(json.dumps(content), encoding="utf-8")
    read_or_refused(load_from_json, folder / "set.json")


@given(text=mutated(CONFIG))
def test_dataset_configs(folder: Path, text: bytes) -> None:
    (folder / "config.toml").write_bytes(text)
    read_or_refused(read_config, folder / "config.toml")


KEYS = ["resolution", "batch_size", "enable_bucket", "min_bucket_reso", "skip_image_resolution", "validation_split",
        "subsets", "bucket_no_upscale", "network_multiplier"]  # fmt: skip
SUBSET_KEYS = [
    "image_dir",
    "num_repeats",
    "caption_extension",
    "metadata_file",
    "is_reg",
    "class_tokens",
    "face_crop_aug_range",
]


@given(
    dataset=st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
    subset=st.dictionaries(st.sampled_from(SUBSET_KEYS), values, max_size=4),
)
def test_values_of_dataset_configs(folder: Path, dataset: dict, subset: dict) -> None:
    content = {"datasets": [{"resolution": 512, "subsets": [{"image_dir": "x", **subset}], **dataset}]}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    read_or_refused(read_config, folder / "config.json")


@given(st.dictionaries(st.sampled_from([*AdapterOptions.__dataclass_fields__, "other"]), values, max_size=4))
def test_options(table: dict) -> None:
    read_or_refused(AdapterOptions.from_tables, ("here", table))


@pytest.mark.parametrize("suffix", TABLES)
@given(data=st.data())
def test_tables(folder: Path, suffix: str, data: st.DataObject) -> None:
    path = folder / f"table{suffix}"
    path.write_bytes(data.draw(mutated(TABLES[suffix].encode())))
    read_or_refused(read_size_table, path)
