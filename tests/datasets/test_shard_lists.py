"""Lists of shards that others write: their shards, the sizes in them, and what is wrong with them."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")

from PIL import Image

from kohya_bucket import KohyaBuckets
from kohya_bucket.datasets.images import BucketedDataset
from kohya_bucket.datasets.webdataset import TarSource
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.tar_index import TarIndex, is_shard_list, listed_shards

SIZES = [(64, 32), (32, 64), (48, 48)]


def make_tar(path: Path, sizes: list[tuple[int, int]] = SIZES) -> Path:
    with tarfile.open(path, "w") as tar:
        for i, size in enumerate(sizes):
            out = io.BytesIO()
            Image.new("RGB", size, (i, 0, 0)).save(out, "PNG")
            for ending, data in (("png", out.getvalue()), ("txt", f"caption {i}".encode())):
                member = tarfile.TarInfo(f"a/{i:03d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path


def write(path: Path, data: object) -> str:
    path.write_text(json.dumps(data), encoding="utf-8")
    return str(path)


def test_a_wids_index_names_its_shards(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    tars = [make_tar(tmp_path / "data" / f"{n}.tar") for n in range(3)]
    entries = [
        {"url": f"data/{tar.name}", "nsamples": 3, "filesize": tar.stat().st_size, "md5sum": "x"} for tar in tars
    ]
    index = write(tmp_path / "index.json", {"wids_version": 1, "shardlist": entries})
    assert is_shard_list(index)
    found = TarIndex.build([index])
    assert found.shards == [str(tar) for tar in tars]
    assert found.sizes.tolist() == [list(size) for size in SIZES * 3]
    data = BucketedDataset.from_source(TarSource(found), KohyaBuckets(64, 32, 128, 16))
    assert np.unique(data.source.shards).tolist() == [0, 1, 2]
    make_tar(tars[1], SIZES * 9)
    with pytest.raises(KohyaBucketError, match="another version"):
        TarIndex.build([index])


def test_other_json_is_no_list(tmp_path: Path) -> None:
    assert not is_shard_list(write(tmp_path / "sizes.json", {"1": [64, 64]}))
    (tmp_path / "broken.json").write_text("{", encoding="utf-8")
    with pytest.raises(KohyaBucketError, match="cannot be read"):
        listed_shards([tmp_path / "broken.json"])


def test_urls_are_found_from_the_list() -> None:
    from kohya_bucket.images import tar_index

    assert tar_index._beside("https://here.example/a/index.json", "b/0.tar") == "https://here.example/a/b/0.tar"
    assert tar_index._beside("https://here.example/a/index.json", "/0.tar") == "https://here.example/0.tar"
    assert tar_index._beside("index.json", "s3://other/0.tar") == "s3://other/0.tar"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"wids_version": 2, "shardlist": [{"url": "a.tar"}]}, "version 2"),
        ({"wids_version": 1, "shardlist": []}, "without shards"),
        ({"wids_version": 1, "shardlist": [{"nsamples": 3}]}, "has no url"),
        ({"wids_version": 1, "datasets": [{"source_url": "x"}]}, "refers to other indices"),
        ([1, 2], "no index of wids"),
        ({"files": {}}, "name the tar files themselves"),
    ],
)
def test_what_is_wrong_with_a_list_is_said(tmp_path: Path, data: object, said: str) -> None:
    with pytest.raises(KohyaBucketError, match=said):
        TarIndex.build([write(tmp_path / "x.json", data)])


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_in_pieces_are_refused_by_name(tmp_path: Path, kind: int) -> None:
    """As `tar --sparse` writes them: the map of the pieces, then these; here one piece, after a hole."""
    tar = tmp_path / "x.tar"
    with tarfile.open(tar, "w", format=kind) as file:
        member = tarfile.TarInfo("a/000.png")
        data = b"x" * 512
        if kind == tarfile.PAX_FORMAT:
            member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": member.name,
                                  "GNU.sparse.realsize": "1024"}  # fmt: skip
            data = b"1\n512\n512\n".ljust(512, b"\0") + data
            member.size = len(data)
            file.addfile(member, io.BytesIO(data))
        else:
            member.size = len(data)
            block = bytearray(member.tobuf(tarfile.GNU_FORMAT))
            block[156:157] = tarfile.GNUTYPE_SPARSE
            block[386:410] = b"%011o\0%011o\0" % (512, 512)
            block[483:495] = b"%011o\0" % 1024
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
            file.fileobj.write(bytes(block) + data)
            file.offset += len(block) + len(data)
    with pytest.raises(KohyaBucketError, match=r"a/000.png is stored without its holes"):
        TarIndex.build([str(tar)])


@pytest.mark.parametrize("size", ["-1", "1e20", str(10**20), "x"])
def test_impossible_lengths_are_one_error(tmp_path: Path, size: str) -> None:
    tar = tmp_path / "x.tar"
    with tarfile.open(tar, "w", format=tarfile.PAX_FORMAT) as file:
        member = tarfile.TarInfo("a/000.png")
        member.size, member.pax_headers = 512, {"size": size}
        file.addfile(member, io.BytesIO(b"x" * 512))
    with pytest.raises(KohyaBucketError, match=r"x\.tar: "):
        TarIndex.build([str(tar)])


@pytest.mark.parametrize(
    "url", ["reference://a.tar", "github://a.tar", "generic://a.tar", "dir://a.tar", "nothing://a.tar", "a\0b.tar"]
)
def test_an_address_that_nothing_can_be_read_from_is_one_error(tmp_path: Path, url: str) -> None:
    pytest.importorskip("fsspec")
    index = write(tmp_path / "index.json", {"wids_version": 1, "shardlist": [{"url": url}]})
    with pytest.raises(KohyaBucketError):
        TarIndex.build([index])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_as_shard_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(KohyaBucketError, match="not a regular file"):
        TarIndex.build([str(tmp_path / "x.tar")])


def test_an_index_with_a_name_that_is_not_utf_8_is_not_written(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        out = io.BytesIO()
        Image.new("RGB", (64, 32)).save(out, "PNG")
        member = tarfile.TarInfo("caf\u00e9.png")
        member.size = len(out.getvalue())
        tar.addfile(member, io.BytesIO(out.getvalue()))
    index = tmp_path / "index.parquet"
    with pytest.raises(KohyaBucketError, match="is not UTF-8: rename the member"):
        TarIndex.build([tmp_path / "a.tar"]).save(index)
    assert not index.exists()
