"""What a config names: mistakes in it end the run with one line, before anything is cached or trained."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cache_folder import Dataset, Folder
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import ConfigError
from kohya_bucket.trainers.musubi.items import item_stem, stems_of, table_of
from kohya_bucket.trainers.musubi.trained_items import Trained, items_of_config, pick_out_of


def listed(rows: list[dict[str, Any]]) -> Any:
    return Dataset(
        architecture="zi",
        datasource=SimpleNamespace(data=rows, image_jsonl_file="list.jsonl"),
        image_jsonl_file="list.jsonl",
    )


def items(folder: Folder, **keys: Any) -> Trained:
    caches = folder.caches()
    vars(caches.dataset).update(keys)
    return items_of_config(caches, "my.toml")


@pytest.mark.parametrize(
    ("row", "lacks"),
    [({"image_path": "b.png"}, "has no caption"), ({"caption": "b"}, "has no path of an image or a video")],
)
def test_a_line_of_a_list_that_lacks_something(row: dict[str, Any], lacks: str) -> None:
    with pytest.raises(ConfigError, match=f"line 2 of list.jsonl {lacks}"):
        table_of(listed([{"image_path": "a.png", "caption": "a"}, row]))


def test_one_image_written_in_two_ways_with_two_captions_has_two_captions() -> None:
    rows = [{"image_path": "im/a.png", "caption": "one"}, {"image_path": "./im/a.png", "caption": "two"}]
    assert len({source.stem for source in table_of(listed(rows)).sources}) == 2
    rows[1]["caption"] = "one"
    assert len({source.stem for source in table_of(listed(rows)).sources}) == 1


@given(st.lists(st.tuples(*map(st.sampled_from, ("ab", "xy", ["", "p", "q", "pq", "qp"]))), min_size=1, max_size=9))
def test_lines_of_a_list_are_one_item_where_file_caption_and_controls_are_the_same(
    lines: list[tuple[str, str, str]],
) -> None:
    rows = [
        {"image_path": f"im/{image}.png", "caption": caption} | {f"control_path_{i}": one for i, one in enumerate(more)}
        for image, caption, more in lines
    ]
    sources = table_of(dataset := listed(rows)).sources
    assert [source.number for source in sources] == [lines.index(line) for line in dict.fromkeys(lines)]
    assert len({source.stem for source in sources}) == len(sources)
    for source in sources:
        item = SimpleNamespace(item_key=source.item_key, caption=source.caption, frame_count=None)
        assert table_of(dataset).of_item(item, clips=False) is source
        assert item_stem(item.item_key) == source.stem
    few = stems_of([(f"im/{image}.png", None, ()) for image, _, _ in dict.fromkeys(lines)], ".")
    if len({image for image, _, _ in lines}) == len(sources):  # caches of images that are named once keep their names
        assert [source.stem for source in sources] == few


def test_a_data_set_whose_folder_is_not_there_ends_the_run(tmp_path: Path, capsys: Any) -> None:
    folder = Folder(tmp_path, count=0)
    for where, what in ((tmp_path / "elsewhere", "does not exist"), (tmp_path / "im", "has no items with captions")):
        with pytest.raises(SystemExit) as end:
            items(folder, image_directory=str(where))
        assert end.value.code == 2
        assert f"{what}: correct its path" in capsys.readouterr().err


def test_a_data_set_that_is_repeated_0_times_trains_nothing(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.make()
    assert len(items(folder)) == 3
    nothing = items(folder, num_repeats=0)
    pick_out_of(buckets := {(64, 64): []}, nothing)
    assert buckets == {}


def test_a_list_without_a_cache_folder(tmp_path: Path) -> None:
    caches = Folder(tmp_path).caches()
    caches.dataset.cache_directory = None  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="has no cache_directory"):
        type(caches)(caches.dataset, caches.selector)
