"""Indices that the real `wids` and `webshart` write, read as they read them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from PIL import Image

from kohya_bucket.datasets.webdataset import TarSource
from kohya_bucket.images.shard_lists import is_shard_list
from kohya_bucket.images.tar_index import TarIndex

KINDS = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp"}


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(0)
    paths = []
    for shard in range(3):
        paths.append(tmp_path / "data" / f"part-{shard:03d}.tar")
        paths[-1].parent.mkdir(exist_ok=True)
        with tarfile.open(paths[-1], "w") as tar:
            for i in range(20):
                kind = list(KINDS)[i % 3]
                exif = Image.Exif()
                exif[0x112] = 1 + i % 8
                out = io.BytesIO()
                size = tuple(rng.integers(16, 200, 2).tolist())
                Image.new("RGB", size, (i, shard, 0)).save(out, kind, exif=exif)
                files = {KINDS[kind]: out.getvalue(), "txt": f"caption {shard} {i}".encode(), "json": b'{"n": 1}'}
                for ending, data in files.items():
                    member = tarfile.TarInfo(f"images/{shard}_{i:04d}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return paths


def test_webshart(tars: list[Path], tmp_path: Path) -> None:
    webshart = pytest.importorskip("webshart", reason="webshart is not installed")
    command = [sys.executable, "-c", "import webshart; webshart.main()", "extract-metadata", "--source", "./data"]
    options = ["--destination", "./data/", "--include-image-geometry"]
    subprocess.run([*command, *options], cwd=tmp_path, check=True, capture_output=True)
    indices = [tar.with_suffix(".json") for tar in tars]
    assert all(map(is_shard_list, indices))
    read = TarIndex.build([str(tar) for tar in tars])
    found = TarIndex.build([str(index) for index in indices])
    assert found.shards == read.shards
    assert list(found.keys) == list(read.keys)
    for name in read.rows.dtype.names:
        if name != "orientation":
            assert found.rows[name].tolist() == read.rows[name].tolist(), name
    assert [TarSource(found).caption(i) for i in (0, 59)] == ["caption 0 0", "caption 2 19"]
    # its own reader has the same bytes and sizes
    opened = webshart.discover_dataset(source=str(tmp_path / "data"))
    for shard in range(3):
        names = opened.list_files_in_shard(shard)
        reader = opened.open_shard(shard)
        stated = json.loads(indices[shard].read_text(encoding="utf-8"))["files"]
        for row in range(20 * shard, 20 * shard + 20):
            place = found.rows[row]
            name = next(n for n in names if n.startswith(f"{found.keys[row]}.") and n.endswith(tuple(KINDS.values())))
            with tars[shard].open("rb") as file:
                file.seek(int(place["offset"]))
                assert file.read(int(place["length"])) == bytes(reader.read_file(names.index(name)))
            assert (stated[name]["width"], stated[name]["height"]) == (place["width"], place["height"])
    for tar in tars:
        tar.unlink()
    assert TarIndex.build([str(index) for index in indices]).rows.tolist() == found.rows.tolist()


@pytest.mark.parametrize("base", ["beside", "in a folder"])
def test_wids(tars: list[Path], tmp_path: Path, base: str) -> None:
    pytest.importorskip("wids", reason="wids is not installed")
    from wids.wids import ShardListDataset

    folder = tmp_path if base == "in a folder" else tmp_path / "data"
    names = [str(tar.relative_to(folder)) for tar in tars]
    program = "import sys, wids.wids_index as w; sys.argv = ['wids', *sys.argv[1:]]; w.main()"
    command = [sys.executable, "-c", program, "create", *names, "--output", "index.json"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    index = folder / "index.json"
    assert is_shard_list(index)
    found = TarIndex.build([str(index)])
    read = TarIndex.build([str(tar) for tar in tars])
    assert found.shards == read.shards
    assert found.rows.tolist() == read.rows.tolist()
    theirs = ShardListDataset(str(index), cache_dir=str(tmp_path / "cache"), transformations=[])
    assert len(theirs) == len(found)
    assert [theirs.shards[i]["url"] for i in range(3)] == found.shards
