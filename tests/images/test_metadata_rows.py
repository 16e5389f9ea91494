"""Rows put into a metadata cache by hand, and the cache as a table."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import ImageFormat, MetadataCache, MetadataRow, read_sizes


@pytest.fixture
def folder(tmp_path):
    for i in range(4):
        Image.new("RGB", (20 + i, 30)).save(tmp_path / f"{i}.png")
    (tmp_path / "9.png").write_bytes(b"no image")
    return tmp_path


def row_of(path, width: int, height: int) -> MetadataRow:
    status = path.stat()
    return MetadataRow(str(path), width, height, status.st_mtime_ns, status.st_size)


@pytest.mark.parametrize("hashed", [False, True])
def test_rows_are_replaced_in_their_place_and_new_ones_follow(folder, hashed) -> None:
    paths = sorted(folder.glob("*.png"))
    before = MetadataCache.build(paths, hash=hashed)
    changed, new = (
        row_of(paths[1], 640, 480),
        MetadataRow(str(folder / "x.png"), 7, 8, 1, 1, ImageFormat.PNG, 6, "ab" * 16),
    )
    cache = before.with_rows(MetadataRow(str(paths[1]), 1, 1, 1, 1), new, changed)
    rows, old = list(cache), list(before)
    assert [row.path for row in rows] == [*map(str, paths), str(folder / "x.png")]
    assert rows[1] == changed
    assert rows[5] == (new if hashed else new._replace(hash=None))
    assert [rows[i] for i in (0, 2, 3, 4)] == [old[i] for i in (0, 2, 3, 4)]
    assert rows[4].reason == old[4].reason is not None
    assert cache.get_dim(paths[1]) == (640, 480)
    assert before.get_dim(paths[1]) == (21, 30)


def test_known_sizes_spare_the_headers_while_the_files_stay_as_they_are(folder) -> None:
    path = folder / "0.png"
    cache = MetadataCache().with_rows(row_of(path, 333, 444))
    assert read_sizes([path], cached=cache).sizes.tolist() == [[333, 444]]
    os.utime(path, ns=(1, 1))
    assert cache.is_stale(path)
    assert read_sizes([path], cached=cache).sizes.tolist() == [[20, 30]]
    assert repr(cache) == "<MetadataCache n=1 unreadable=0 hashed=False>"


def test_rows_are_kept_in_the_file(folder, tmp_path) -> None:
    cache = MetadataCache.build(sorted(folder.glob("*.png"))).with_rows(MetadataRow("relative.png", 5, 6, 7, 8))
    cache.save(tmp_path / "c.parquet")
    assert list(MetadataCache.load(tmp_path / "c.parquet")) == list(cache)
    assert cache.get("relative.png").path == str(Path.cwd() / "relative.png")


def test_rows_that_cannot_be_are_refused(folder) -> None:
    cache = MetadataCache.build([folder / "0.png"])
    for bad, why in [
        (("a.png", 1, 2), "must be a MetadataRow"),
        (MetadataRow("a.png", -1, 2, 0, 0), "a side below 0"),
        (MetadataRow("a.png", 1.5, 2, 0, 0), "whole numbers"),
        (MetadataRow("a.png", 0, 2, 0, 0), "a.png is 0x2: give both sides"),
        (MetadataRow("a.png", 1, 2, 0, 0, orientation=0), "the orientation 0, but"),
        (MetadataRow("a.png", 1, 2, 0, 0, orientation=300), "the orientation 300, but"),
        (MetadataRow("a.png", 1, 2, 0, 0, format=200), "the format 200, but"),
        (MetadataRow("a.png", 1, 2, 0, 0, hash="ab"), "the hash 'ab', but must have 32"),
    ]:
        with pytest.raises(KohyaBucketError, match=why):
            cache.with_rows(bad)
    with pytest.raises(KohyaBucketError, match=r"paths is a list, but .*with_rows\(\*rows\)"):
        MetadataCache([MetadataRow("a.png", 1, 2, 0, 0)])


def test_many_rows_at_once_are_what_single_ones_are() -> None:
    rng, folder = np.random.default_rng(0), Path.cwd()
    rows = [MetadataRow(str(folder / f"{rng.integers(30)}.png"), int(rng.integers(1, 99)), 5, i, i) for i in range(120)]
    one = MetadataCache()
    expected: dict[str, MetadataRow] = {}
    for row in rows:
        one = one.with_rows(row)
        expected[row.path] = row
    assert list(one) == list(MetadataCache().with_rows(*rows)) == list(expected.values())
