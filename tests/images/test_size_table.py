"""Tables of sizes, and a hostile one."""

import json
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.size_table import read_size_table

ROWS = [(7, 640, 480), (3, 512, 768), (1000000007, 1, 20000)]


def write(path, suffix):
    target = path / f"sizes{suffix}"
    if suffix == ".csv":
        target.write_text("\ufeffheight,id,width\n" + "".join(f"{h},{i},{w}\n" for i, w, h in ROWS), encoding="utf-8")
    elif suffix == ".json":
        target.write_text(json.dumps([{"id": i, "width": w, "height": h} for i, w, h in ROWS]), encoding="utf-8")
    elif suffix == ".parquet":
        ids, widths, heights = zip(*ROWS, strict=True)
        pq.write_table(pa.table({"id": ids, "width": widths, "height": heights}), target)
    else:
        target.write_bytes(pickle.dumps({i: (w, h) for i, w, h in ROWS}))
    return target


@pytest.mark.parametrize("suffix", [".csv", ".json", ".parquet", ".pkl", ".pickle"])
def test_every_format_holds_the_same(tmp_path, suffix) -> None:
    table = read_size_table(write(tmp_path, suffix))
    assert table.ids.tolist() == [i for i, _, _ in ROWS]
    assert table.ids.dtype == np.int64
    assert table.sizes.tolist() == [[w, h] for _, w, h in ROWS]


@pytest.mark.parametrize("content", [[["a", 1, 2], ["b", 3, 4]], {"a": [1, 2], "b": [3, 4]}])
def test_json_lists_and_mappings_and_ids_of_text(tmp_path, content) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    table = read_size_table(path)
    assert (table.ids.tolist(), table.sizes.tolist()) == (["a", "b"], [[1, 2], [3, 4]])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "id,width\n1,2\n", "has no height"),
        ("t.csv", "id,width,height\n1,2,x\n", "'1' is '2'x'x', but sides are whole numbers"),
        ("t.csv", "id,width,height\n1,2,3\n1,4,5\n", "the id '1' occurs twice"),
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
    ],
)
def test_what_is_no_table_is_named(tmp_path, name, text, message) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(KohyaBucketError, match=message):
        read_size_table(path)


class Hostile:
    """A pickle of this runs a command when it is read with `pickle.load`."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_is_refused_by_name_and_runs_nothing(tmp_path, protocol) -> None:
    proof, path = tmp_path / "it-ran", tmp_path / "resolutions.pkl"
    hostile = Hostile(f'echo > "{proof}"')
    path.write_bytes(pickle.dumps({1: (2, 3), 4: hostile}, protocol))
    with pytest.raises(KohyaBucketError, match=r"asks for (STACK_GLOBAL|GLOBAL).* nothing was run"):
        read_size_table(path)
    assert not proof.exists()
    # The same bytes do run where nothing is refused.
    pickle.loads(path.read_bytes())
    assert proof.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({1: [2, 3]}, "asks for EMPTY_LIST"),
        ({1: (2.5, 3)}, "asks for BINFLOAT"),
        ({1: (True, 3)}, "asks for NEWTRUE"),
        ({b"a": (2, 3)}, "asks for SHORT_BINBYTES"),
        ([1, 2], "asks for EMPTY_LIST"),
        ({1: np.int64(3)}, "asks for STACK_GLOBAL"),
        ({1: ((2, 3), 4)}, "holds a tuple that is not a pair"),
        ({1: (2, 3, 4)}, "asks for TUPLE3"),
        ({1: 2**70}, "holds a number of 71 bits"),
        (7, "holds a int, but must be a dict"),
    ],
)
def test_a_pickle_of_anything_else_is_refused(tmp_path, value, message) -> None:
    path = tmp_path / "resolutions.pkl"
    path.write_bytes(pickle.dumps(value))
    with pytest.raises(KohyaBucketError, match=message):
        read_size_table(path)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_what_pickle_writes_is_read(tmp_path, protocol) -> None:
    shared = (512, 768)
    content = {1: shared, 2: shared, -3: (2**31 - 1, 70_000), 2**40: (255, 256), "ü\u2028": (3, 4), ("a", 1): (1, 1)}
    content |= {1000 + i: (i, 65_536 - i) for i in range(3000)}
    path = tmp_path / "resolutions.pkl"
    path.write_bytes(pickle.dumps(content, protocol))
    table = read_size_table(path)
    assert dict(zip(table.ids.tolist(), map(tuple, table.sizes.tolist()), strict=True)) == {
        str(key): size for key, size in content.items()
    }


def test_a_pickle_that_would_take_for_ever_is_refused_at_once(tmp_path) -> None:
    pair_in_pair = b"".join(b"q%ch%c\x86" % (i, i) for i in range(60))
    path = tmp_path / "resolutions.pkl"
    for program in (
        b"\x80\x02}K\x01" + pair_in_pair + b"K\x01s.",  # as a key
        b"\x80\x02}K\x01K\x01" + pair_in_pair + b"s.",  # as a size
    ):
        path.write_bytes(program)
        with pytest.raises(KohyaBucketError, match="holds a tuple"):
            read_size_table(path)
    path.write_bytes(b"\x80\x02}K\x01\x8b\xff\xff\xff\x7f")
    with pytest.raises(KohyaBucketError, match="damaged or not a pickle: "):
        read_size_table(path)
    path.write_bytes(b"\x80\x02}r\xff\xff\xff\x0f.")  # a memo of 2^28 objects
    with pytest.raises(KohyaBucketError, match="keeps an object as number 268435455"):
        read_size_table(path)


@pytest.mark.parametrize(
    "data", [b"", b"no pickle", b"\x80\x05K\x01", b"cos\nsystem\n.", b"Pabc\n.", b"(s.", b"s.", b"u.", b"}s.", b"\x86."]
)
def test_damaged_files_are_errors_and_no_crash(tmp_path, data) -> None:
    path = tmp_path / "resolutions.pkl"
    path.write_bytes(data)
    with pytest.raises(KohyaBucketError):
        read_size_table(path)
