"""Tables of another content than they should have: one clear error, before much of them is unpacked."""

import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.focus_files import read_focus
from kohya_bucket.images.size_table import read_size_table


def not_utf8() -> object:
    raw = pa.array([b"\xff\xfe", b"b"], pa.binary())
    return pa.Array.from_buffers(pa.string(), 2, raw.buffers())


ODD = {
    "lists": lambda: pa.array([[1], [2]]),
    "maps": lambda: pa.array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int64())),
    "dates": lambda: pa.array([datetime.date(2020, 1, 1), datetime.date(2020, 1, 2)]),
    "bytes": lambda: pa.array([b"a", b"b"]),
    "gaps": lambda: pa.array(["a", None]),
    "no UTF-8": not_utf8,
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("column", ["id", "width"])
def test_columns_of_other_types(tmp_path: Path, kind: str, column: str) -> None:
    good = {"id": pa.array([1, 2]), "width": pa.array([64, 64]), "height": pa.array([64, 96])}
    pq.write_table(pa.table({**good, column: ODD[kind]()}), tmp_path / "sizes.parquet")
    with pytest.raises(KohyaBucketError, match=r"sizes\.parquet"):
        read_size_table(tmp_path / "sizes.parquet")


@pytest.mark.parametrize("kind", ODD)
def test_names_of_other_types_in_a_focus_file(tmp_path: Path, kind: str) -> None:
    focus = pa.array([[0.1, 0.2], [0.1, 0.2]])
    pq.write_table(pa.table({"image": ODD[kind](), "focus": focus}), tmp_path / "focus.parquet")
    with pytest.raises(KohyaBucketError, match=r"focus\.parquet"):
        read_focus(str(tmp_path / "focus.parquet"), [])


@pytest.mark.weekly
def test_millions_of_rows_in_a_small_file_are_not_unpacked(tmp_path: Path) -> None:
    rows = 20_000_000
    same = pa.DictionaryArray.from_arrays(pa.nulls(rows, pa.int32()).fill_null(0), pa.array(["a"]))
    number = pa.nulls(rows, pa.int32()).fill_null(64)
    file = tmp_path / "sizes.parquet"
    pq.write_table(pa.table({"id": same, "width": number, "height": number}), file, compression="zstd")
    assert file.stat().st_size < 1 << 20
    with pytest.raises(KohyaBucketError, match=r"claims to hold 20000000 rows"):
        read_size_table(file)
    pairs = pa.FixedSizeListArray.from_arrays(pa.nulls(2 * rows, pa.float32()).fill_null(0.5), 2)
    pq.write_table(pa.table({"image": same, "focus": pairs}), tmp_path / "focus.parquet", compression="zstd")
    with pytest.raises(KohyaBucketError, match=r"claims to hold 20000000 rows"):
        read_focus(str(tmp_path / "focus.parquet"), [])


@pytest.mark.parametrize("text", ['[{"id": [1], "width": 1, "height": 1}]', '[[{"a": 1}, 1, 1]]', "[[null, 1, 1]]"])
def test_ids_in_json_that_are_no_names(tmp_path: Path, text: str) -> None:
    (tmp_path / "sizes.json").write_text(text, encoding="utf-8")
    with pytest.raises(KohyaBucketError, match="is neither a number nor a text"):
        read_size_table(tmp_path / "sizes.json")
