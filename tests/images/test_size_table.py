"""Tables of sizes."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.size_table import read_named_sizes, read_size_table

ROWS = [(7, 640, 480), (3, 512, 768), (1000000007, 1, 20000)]


def write(path, suffix):
    target = path / f"sizes{suffix}"
    if suffix == ".csv":
        target.write_text("\ufeffheight,id,width\n" + "".join(f"{h},{i},{w}\n" for i, w, h in ROWS), encoding="utf-8")
    elif suffix == ".json":
        target.write_text(json.dumps([{"id": i, "width": w, "height": h} for i, w, h in ROWS]), encoding="utf-8")
    else:
        ids, widths, heights = zip(*ROWS, strict=True)
        pq.write_table(pa.table({"id": ids, "width": widths, "height": heights}), target)
    return target


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet"])
def test_every_format_holds_the_same(tmp_path, suffix) -> None:
    sizes = read_size_table(write(tmp_path, suffix))
    assert sizes.dtype == np.int32
    assert sizes.tolist() == [[w, h] for _, w, h in ROWS]


@pytest.mark.parametrize("key", ["id", "path", "key"])
@pytest.mark.parametrize("gap", [None, float("nan")])
def test_rows_without_a_size_are_images_without_one(tmp_path, key, gap) -> None:
    columns = {key: ["a", "b", "c", "d"], "width": [640, gap, 512, gap], "height": [480, 480, gap, gap]}
    if gap is None:
        pq.write_table(pa.table(columns), tmp_path / "whole.parquet")
        rows = [{name: column[i] for name, column in columns.items() if column[i] is not None} for i in range(4)]
        (tmp_path / "objects.json").write_text(json.dumps(rows), encoding="utf-8")
        (tmp_path / "pairs.json").write_text(
            json.dumps({name: [w, h] for name, w, h in zip(*columns.values(), strict=True)}), encoding="utf-8"
        )
    else:
        pq.write_table(pa.table({**columns, "width": pa.array(columns["width"], pa.float64())}), tmp_path / "f.parquet")
    for text in ("", "None", "nan", "NULL", "\\N"):
        lines = [",".join(columns), "a,640.0,480", f"b,{text},480", f"c,512.00,{text}", "d"]
        (tmp_path / f"{len(text)}.csv").write_text("\n".join(lines), encoding="utf-8")
    tables = sorted(tmp_path.iterdir())
    assert len(tables) >= 5
    for path in tables:
        names, sizes = read_named_sizes(path)
        assert (names, sizes.tolist()) == ([*"abcd"], [[640, 480], [0, 0], [0, 0], [0, 0]]), path


@pytest.mark.parametrize("content", [[["a", 1, 2], ["b", 3, 4]], {"a": [1, 2], "b": [3, 4]}])
def test_json_lists_and_mappings_and_ids_of_text(tmp_path, content) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert read_size_table(path).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "id,width\n1,2\n", "has no height"),
        ("t.csv", "id,width,height\n1,2,x\n", "'1' is '2'x'x', but sides are whole numbers"),
        ("t.csv", "id,width,height\n1,2,3\n1,4,5\n", "the id '1' occurs twice"),
        ("t.csv", "id,width,height,width\n1,2,3,9\n", "has the column width 2 times"),
        ("t.json", '{"a": [1, 2], "b": [3, 4], "a": [5, 6]}', "'a' stands twice in one object"),
        ("t.json", '[{"id": 1, "width": 2, "height": 3, "width": 4}]', "'width' stands twice in one object"),
        ("t.json", "[[1, 2]]", r"entry 0 is \[1, 2\]"),
        ("t.json", "[[1, 2.5, 3]]", r"1 is 2.5x3, but sides are whole"),
        ("t.json", '{"a": 5}', "'a' has 5"),
        ("t.json", "3", "holds a int"),
        ("t.json", "[", "not valid JSON"),
        ("t.json", "[" * 100_000, "not valid JSON: .* nested more than 64 deep"),
        ("t.json", f"[[1, 2, {'9' * 5000}]]", "not valid JSON|sides are whole numbers"),
        ("t.json", "[[1, 2147483648, 3]]", r"1 is 2,147,483,648x3, but no side is longer than 2,147,483,647"),
        ("t.csv", "id,width,height\n1,2,9223372036854775807\n", "9,223,372,036,854,775,807, but no side is longer"),
        ("t.csv", "id,width,height\n" + "1" * 200_000 + ",2,3\n", "not valid CSV: field larger than"),
        ("t.parquet", "no table", "damaged or not a Parquet file"),
        ("t.txt", "", r"read from \.txt; give a \.csv"),
        ("resolutions.pkl", "", r"read from \.pkl; give a \.csv"),
    ],
)
def test_what_is_no_table_is_named(tmp_path, name, text, message) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(KohyaBucketError, match=message):
        read_size_table(path)
