"""Focus rectangles from files: what is read, and what is refused with line and value."""

import errno
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket.errors import ConfigError, UnreadableError
from kohya_bucket.images import focus_files
from kohya_bucket.images.focus_files import read_focus

ROWS = [
    {"image": "a.jpg", "focus": [0.1, 0.2, 0.5, 1], "label": "dog"},
    {"image": "sub/b.png", "focus": [0.25, 0.75]},
    {"image": "sub/../ü.webp", "focus": [0, 0, 1, 1]},
]
EXPECTED = [[0.1, 0.2, 0.5, 1.0], [0.25, 0.75, 0.25, 0.75], [0.0, 0.0, 1.0, 1.0]]


@pytest.fixture
def folder(tmp_path):
    focus_files._table.cache_clear()
    (tmp_path / "sub").mkdir()
    for name in ("a.jpg", "sub/b.png", "ü.webp", "none.jpg"):
        (tmp_path / name).touch()
    return tmp_path


def write(folder, *lines):
    path = folder / "focus.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines), "utf-8")
    return str(path)


def test_each_image_gets_its_rectangle_wherever_one_is_read_from(folder, monkeypatch) -> None:
    path = write(folder, ROWS[0], "", *ROWS[1:])
    names = ["sub/b.png", "none.jpg", "ü.webp", "a.jpg"]
    found, missing = read_focus(path, [str(folder / name) for name in names])
    assert found[[3, 0, 2]].tolist() == EXPECTED
    assert np.isnan(found[1]).all()
    assert missing == []
    monkeypatch.chdir(folder)
    again, _ = read_focus("focus.jsonl", ["a.jpg"])
    assert again.tolist() == EXPECTED[:1]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ({"image": "x.jpg", "focus": [10, 20, 300, 400]}, "[10, 20, 300, 400]"),
        ({"image": "x.jpg", "focus": [-0.1, 0, 1, 1]}, "-0.1"),
        ({"image": "x.jpg", "focus": [0.9, 0, 0.1, 1]}, "[0.9, 0, 0.1, 1]"),
        ('{"image": "x.jpg", "focus": [NaN, 0, 1, 1]}', "nan"),
        ({"image": "x.jpg", "focus": [0, 1, 1]}, "[0, 1, 1]"),
        ({"image": "x.jpg", "focus": [0, True, 1, 1]}, "True"),
        ({"image": "x.jpg", "focus": "left"}, "left"),
        ({"image": "x.jpg"}, "x.jpg"),
        ({"image": "", "focus": [0, 0]}, "focus"),
        ({"image": 3, "focus": [0, 0]}, "3"),
        ("[1, 2]", "[1, 2]"),
        ('{"image": "x.jpg", "focus": [0, 0', ""),
        ({"image": "x.jpg", "focus": [0, 0, 1, 10**30]}, "outside the picture"),
        ("null", "None"),
    ],
)
def test_what_is_no_rectangle_is_refused_with_its_line_and_value(folder, line, value) -> None:
    path = write(folder, ROWS[0], "", line, ROWS[1])
    with pytest.raises(ConfigError, match=r"focus\.jsonl, line 3: ") as error:
        read_focus(path, [])
    assert value in str(error.value)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_lines_are_read_the_same_however_many_at_a_time(folder, monkeypatch, size) -> None:
    monkeypatch.setattr(focus_files, "_LINES", size)
    path = write(folder, ROWS[0], "", *ROWS[1:], {"image": "last.jpg", "focus": [0, 1]})
    _, rectangles = focus_files._json_lines(path, Path(path).read_bytes())
    assert rectangles.tolist() == [*EXPECTED, [0, 1, 0, 1]]
    for halves in (['{"image": "x.jpg"', '"focus": [0, 0]}'], ['{"image": "x.jpg", "focus": [0', "0.5]}", "{}"]):
        with pytest.raises(ConfigError, match="line 5: "):
            read_focus(write(folder, ROWS[0], "", *ROWS[1:], *halves), [])


def test_images_that_are_not_there_are_named_and_others_of_the_file_are_not(folder) -> None:
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "there.jpg").touch()
    names = ["sub/there.jpg", "sub/../a.jpg", "sub/gone.jpg", "nowhere/b.jpg", "no\0name/c.jpg", str(folder / "d.jpg")]
    (folder / "a.jpg").touch()
    path = write(folder, *({"image": name, "focus": [0, 0]} for name in names))
    assert read_focus(path, [])[1] == names[2:]


def test_one_image_has_one_focus_however_it_is_spelled(folder) -> None:
    path = write(folder, *ROWS, {"image": "sub/../a.jpg", "focus": [0, 0]})
    with pytest.raises(ConfigError, match="more than one focus"):
        read_focus(path, [])


@pytest.mark.parametrize("where", ["nowhere.jsonl", ".", "a\0b", "\ud800"])
def test_what_is_no_file_is_refused(tmp_path, monkeypatch, where) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"\.jsonl or \.parquet"):
        read_focus(where, [])


@pytest.mark.posix("not everybody may make links there")
def test_a_file_beside_an_image_that_cannot_be_read_is_named(tmp_path) -> None:
    (tmp_path / "a.focus.json").symlink_to("gone")
    with pytest.raises(ConfigError, match=r"a\.focus\.json"):
        read_focus("beside", [str(tmp_path / "a.jpg")])


def test_a_folder_that_cannot_be_listed_now_is_not_one_without_focus(tmp_path, monkeypatch) -> None:
    def listdir(folder):
        raise OSError(errno.EIO, os.strerror(errno.EIO), folder)

    (tmp_path / "file").touch()
    without = [str(tmp_path / "gone" / "a.jpg"), str(tmp_path / "file" / "a.jpg"), "memory://x/a.jpg"]
    assert np.isnan(read_focus("beside", without)[0]).all()
    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(UnreadableError, match=re.escape(str(tmp_path))):
        read_focus("beside", [str(tmp_path / "a.jpg")])


def test_a_table_is_read_like_lines(tmp_path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"image": row["image"], "focus": [float(v) for v in row["focus"]]} for row in ROWS]
    path = tmp_path / "focus.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    found, missing = read_focus(str(path), [str(tmp_path / "a.jpg"), str(tmp_path / "sub" / "b.png")])
    assert found.tolist() == EXPECTED[:2]
    assert missing == ["sub/../ü.webp"]
    pq.write_table(pa.Table.from_pylist([*rows, {"image": "x.jpg", "focus": [2.0, 3.0]}]), path)
    with pytest.raises(ConfigError, match=r"row 4: .*2\.0"):
        read_focus(str(path), [])
    pq.write_table(pa.table({"image": ["x.jpg"]}), path)
    with pytest.raises(ConfigError, match=r"focus\.parquet"):
        read_focus(str(path), [])


def test_files_beside_images_and_those_of_simpletuner(tmp_path) -> None:
    (tmp_path / "a.focus.json").write_text(json.dumps({"focus": EXPECTED[0]}))
    (tmp_path / "b.focus.json").write_text("[0.25, 0.75]")
    boxes = [{"label": "cat", "bbox": [0.1, 0.2, 0.3, 0.4]}, {"label": "dog", "bbox": [0.2, 0.1, 0.8, 0.3]}]
    (tmp_path / "c.bbox").write_text(json.dumps(boxes))
    (tmp_path / "d.bbox").write_text("[]")
    found, missing = read_focus("beside", [str(tmp_path / f"{name}.jpg") for name in "abcde"])
    assert found[:3].tolist() == [*EXPECTED[:2], [0.1, 0.1, 0.8, 0.4]]
    assert np.isnan(found[3:]).all()
    assert missing == []
    (tmp_path / "e.bbox").write_text('[{"bbox": [0, 0, 5, 5]}]')
    with pytest.raises(ConfigError, match=r"e\.bbox.*5"):
        read_focus("beside", [str(tmp_path / "e.jpg")])


def test_the_recipe_for_coco_makes_a_file_that_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "look.md").read_text(encoding="utf-8")
    (recipe,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "instances.json" in code)
    images = [{"id": i, "file_name": f"{i}.png", "width": 400, "height": 200} for i in range(3)]
    boxes = [(0, [0, 0, 40, 20]), (0, [60, 40, 40, 60]), (2, [300, 100, 200, 50.5])]
    annotations = [{"image_id": image, "bbox": box} for image, box in boxes]
    Path("instances.json").write_text(json.dumps({"images": images, "annotations": annotations}), encoding="utf-8")
    Path("data").mkdir()
    exec(recipe, {})
    focus, missing = read_focus("data/focus.jsonl", [f"data/{i}.png" for i in range(3)])
    assert np.array_equal(focus, [[0, 0, 0.25, 0.5], [np.nan] * 4, [0.75, 0.5, 1, 0.7525]], equal_nan=True)
    assert missing == []
