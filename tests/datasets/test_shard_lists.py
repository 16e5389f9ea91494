"""What is wrong with tars that others write."""

import io
import os
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.tar_index import TarIndex

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
    with pytest.raises(KohyaBucketError, match=r"a/000.png is stored as a sparse file"):
        TarIndex.build([str(tar)])


def as_since_3_14(member: tarfile.TarInfo, count: int, block=tarfile.TarInfo._block) -> int:
    if count < 0:
        raise tarfile.InvalidHeaderError("invalid offset")
    return block(member, count)


@pytest.mark.parametrize("block", [tarfile.TarInfo._block, as_since_3_14])
@pytest.mark.parametrize("size", ["-1", "1e20", str(10**20), "x"])
def test_impossible_lengths_are_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str, block) -> None:
    tar = tmp_path / "x.tar"
    monkeypatch.setattr(tarfile.TarInfo, "_block", block)
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
    with pytest.raises(KohyaBucketError):
        TarIndex.build([url])


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
