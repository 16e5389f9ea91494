"""`[kohya_bucket] focus`: every placement of an image keeps its rectangle, and what cannot is refused."""

import json
import pickle
import re
from types import SimpleNamespace

import numpy as np
import pytest

from kohya_bucket import ConfigError
from kohya_bucket.buckets.focus import cut_rectangles
from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.trainers.door.config_source import ConfigSource
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.options import AdapterOptions, environment_table, rooted
from kohya_bucket.trainers.door.placed import focus_of
from kohya_bucket.trainers.door.placing import place_images, refuse_conflicts, refuse_unmatched
from kohya_bucket.trainers.sdscripts.carried import ResizedSize
from kohya_bucket.trainers.sdscripts.dataset_images import refuse_random_crops
from kohya_bucket.trainers.sdscripts.tables import column_of

KEYS = DatasetKeys((256, 256), True, 64, 512, 64, False)
SIZES = np.array([(300, 1100), (1100, 300), (300, 310), (305, 1100)], dtype=np.int32)
ROWS = {"a.png": [0, 0, 1, 0.2], "b.png": [1, 0.5], "d.png": [0, 0.9, 1, 1]}


def options(folder, boxes=ROWS, **table):
    path = folder / "focus.jsonl"
    path.write_text("".join(json.dumps({"image": name, "focus": box}) + "\n" for name, box in boxes.items()))
    for name in ROWS:
        (folder / name).touch()
    return AdapterOptions.from_tables(("here", {"focus": str(path), **table}))


def placing(folder, table, sizes=SIZES):
    names = [f"{letter}.png" for letter in "abcd"]
    paths = [str(folder / name) for name in names]
    return place_images(names, np.asarray(sizes, np.int32), np.ones(4, dtype=np.int64), 2, KEYS, table, paths=paths)


@pytest.mark.parametrize("table", [{}, {"resolutions": [128, 256]}, {"remainder": "merge", "merge_max_crop": 0.9}])
def test_no_crop_keeps_less_of_a_rectangle_than_the_middle_at_any_size(tmp_path, table) -> None:
    found = placing(tmp_path, options(tmp_path, **table))
    plain = placing(tmp_path, AdapterOptions.from_tables(("here", table)))
    assert found.trained.buckets == plain.trained.buckets
    assert found.trained.focus is not None
    for image in range(4):
        focus = found.trained.focus[image : image + 1]
        for bucket in range(len(found.trained.buckets)):
            if table.get("resolutions") or table.get("remainder") or bucket == found.trained.bucket_ids[image]:
                here, there = (one.trained.placed_at(image, bucket) for one in (found, plain))
                assert np.array_equal(here.bucket_sizes, there.bucket_sizes)
                assert np.array_equal(here.resized_sizes, there.resized_sizes)
                if np.isnan(focus).any():
                    assert np.array_equal(here.cuts, there.cuts)
                else:
                    assert cut_rectangles(here, focus)[0] <= cut_rectangles(there, focus)[0]


def test_images_without_a_focus_are_placed_to_the_bit_as_without_the_option(tmp_path) -> None:
    found = placing(tmp_path, options(tmp_path)).placement
    plain = placing(tmp_path, AdapterOptions()).placement
    assert found.cuts[2].tolist() == plain.cuts[2].tolist()
    sizes = ResizedSize.from_placement(found)
    assert sizes == ResizedSize.from_placement(plain)  # as sizes they are the same; some know of a cut besides
    moved = (found.cuts != plain.cuts).any(axis=1)
    assert [isinstance(size, ResizedSize) for size in sizes] == moved.tolist()
    assert moved.tolist() == [True, True, False, True]
    assert [size.crop_ltrb((128, 448)) for size in sizes[:1]] == [tuple(found.crop_ltrb[0].tolist())]
    column = pickle.loads(
        pickle.dumps(column_of(sizes, TextColumn.from_texts(["a", "b", "c", "d"])))
    )  # as loaders' workers do
    assert [(column[i], getattr(column[i], "crop", None)) for i in range(4)] == [
        (size, getattr(size, "crop", None)) for size in sizes
    ]
    assert [type(column[i]) for i in range(4)] == list(map(type, sizes))
    assert not any(isinstance(size, ResizedSize) for size in ResizedSize.from_placement(plain))


def test_images_that_the_file_names_and_that_are_not_there_are_named_once(tmp_path, caplog) -> None:
    table = options(tmp_path)
    with (tmp_path / "focus.jsonl").open("a") as file:
        file.write('{"image": "gone.png", "focus": [0, 0]}\n')
    placing(tmp_path, table)
    placing(tmp_path, table)
    assert sum("gone.png" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("focus", ["focus.jsonl", "beside"])
def test_a_focus_of_no_image_is_said_once(tmp_path, caplog, focus) -> None:
    """As where the file has the images of another folder, or those at the other end of a link."""
    options(tmp_path)
    table = AdapterOptions(focus=focus if focus == "beside" else str(tmp_path / focus))
    placing(tmp_path / "other", table)
    placing(tmp_path / "other", table)
    assert ["none of 4 images" in record.getMessage() for record in caplog.records] == [True]


def test_what_cannot_keep_a_focus_refuses_it(tmp_path) -> None:
    table = options(tmp_path)
    with pytest.raises(ConfigError, match="focus"):
        refuse_conflicts(DatasetKeys((256, 256), False), table)
    with pytest.raises(ConfigError, match="random_crop"):
        refuse_random_crops([SimpleNamespace(random_crop=True)], table)
    refuse_random_crops([SimpleNamespace(random_crop=True)], AdapterOptions())


def test_a_relative_path_begins_at_the_configs_folder(tmp_path, monkeypatch):
    config, elsewhere = tmp_path / "configs", tmp_path / "elsewhere"
    config.mkdir()
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    options(config)
    source = ConfigSource(config / "a.toml", {"kohya_bucket": {"focus": "focus.jsonl"}})
    (config / "a.json").write_text(json.dumps({"focus": "focus.jsonl"}), encoding="utf-8")
    monkeypatch.setenv("KOHYA_BUCKET_CONFIG", str(config / "a.json"))
    for found in (AdapterOptions.of_config(source, Findings()), AdapterOptions.from_tables(*environment_table())):
        assert found.focus == str(config / "focus.jsonl")
    source.data["kohya_bucket"]["focus"] = "gone.jsonl"
    with pytest.raises(ConfigError, match=re.escape(str(config / "gone.jsonl"))):
        placing(config, AdapterOptions.of_config(source, Findings()))
    for other in ("beside", str(elsewhere / "focus.jsonl")):
        assert rooted({"focus": other}, config) == {"focus": other}


def test_a_focus_that_no_image_of_any_data_set_has_is_refused(tmp_path):
    chosen = options(tmp_path)
    images = [[str(tmp_path / name)] for name in ("a.png", "c.png")]
    found = [focus_of(chosen, paths) for paths in images]
    refuse_unmatched(chosen, found)  # one of them has one
    with pytest.raises(ConfigError, match=re.escape(f"none of 1 image has a focus (names are relative to {tmp_path}")):
        refuse_unmatched(chosen, found[1:])
    refuse_unmatched(AdapterOptions(), [None, None])
    refuse_unmatched(chosen, [found[0][:0]])  # no images: said otherwise
