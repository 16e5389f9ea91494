"""Indices that the real `wids` writes, read as it reads them."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from PIL import Image

from kohya_bucket.images.tar_index import TarIndex, is_shard_list

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
