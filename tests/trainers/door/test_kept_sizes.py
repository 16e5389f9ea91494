"""Sizes kept between runs."""

import errno
import os
from pathlib import Path

import pyarrow
import pytest
from PIL import Image

from kohya_bucket.images import MetadataCache
from kohya_bucket.trainers.door import sizes as size_cache
from tests.faults import PASSING, Faults
from tests.pictures import make_pictures


@pytest.fixture
def paths(tmp_path):
    return [str(path) for path in make_pictures(tmp_path, [(10 + i, 20) for i in range(6)])]


def test_a_second_scan_opens_no_image(paths, tmp_path, monkeypatch):
    file = tmp_path / "sizes.parquet"
    first = size_cache.scan_sizes(paths, str(file))
    assert first.sizes.tolist() == [[10 + i, 20] for i in range(6)]
    written = file.stat().st_mtime_ns
    with open(paths[0], "r+b") as image:  # same length and time, other content: only a reader would notice
        before = Path(paths[0]).stat()
        image.write(b"\0" * 8)
    os.utime(paths[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert size_cache.scan_sizes(paths, str(file)).sizes.tolist() == first.sizes.tolist()
    assert file.stat().st_mtime_ns == written


def test_changes_are_noticed(paths, tmp_path):
    file = tmp_path / "sizes.parquet"
    size_cache.scan_sizes(paths, str(file))
    Image.new("RGB", (99, 98)).save(paths[3])
    os.utime(paths[3], ns=(1, 1))
    assert size_cache.scan_sizes(paths, str(file)).sizes[3].tolist() == [99, 98]


def test_datasets_that_share_a_file_keep_each_others_sizes(paths, tmp_path):
    file = tmp_path / "sizes.parquet"
    for part in (paths[:4], paths[4:], paths[:2]):
        size_cache.scan_sizes(part, str(file))
    Path(paths[5]).unlink()
    more = str(make_pictures(tmp_path / "more", [(7, 8)])[0])
    size_cache.scan_sizes([paths[0], more], str(file))
    assert sorted(MetadataCache.load(file).paths) == sorted([*paths[:5], more])


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_sizes_of_another_dataset_whose_folder_does_not_answer_are_kept(paths, tmp_path, monkeypatch, code):
    file, others = tmp_path / "sizes.parquet", [str(path) for path in make_pictures(tmp_path / "others", [(7, 8)])]
    size_cache.scan_sizes(others, str(file))
    faults = Faults(tmp_path / "others")
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code):
        size_cache.scan_sizes(paths, str(file))
    assert sorted(MetadataCache.load(file).paths) == sorted([*paths, *others])


def test_a_damaged_cache_is_made_anew(paths, tmp_path, monkeypatch):
    monkeypatch.setattr(size_cache, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(size_cache, "AUTOMATIC_FROM", 6)
    file = size_cache.cache_file(paths, "auto")
    file.parent.mkdir()
    file.write_bytes(b"nothing of use")
    for _ in range(2):
        assert size_cache.scan_sizes(paths, "auto").sizes[5].tolist() == [15, 20]
    assert len(MetadataCache.load(file)) == 6


def test_a_file_of_another_kind_stays_as_it_is(paths, tmp_path, caplog):
    table = tmp_path / "captions.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"path": ["a"], "caption": ["mine"]}), table)
    for file in (paths[0], str(table)):
        before = Path(file).read_bytes()
        assert size_cache.scan_sizes(paths, file).sizes[5].tolist() == [15, 20]
        assert Path(file).read_bytes() == before
        assert file in caplog.text


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
@pytest.mark.parametrize("failing", [range(1, 100), range(2, 100), range(3, 4)], ids=["all", "later", "once"])
def test_sizes_that_cannot_be_read_now_stay(paths, tmp_path, monkeypatch, caplog, code, failing):
    file = tmp_path / "kept" / "sizes.parquet"
    size_cache.scan_sizes(paths, str(file))
    before = file.read_bytes()
    faults = Faults(file.parent)
    faults.install(monkeypatch)
    with faults.at(failing, code):
        assert size_cache.scan_sizes(paths[:2], str(file)).sizes.tolist() == [[10, 20], [11, 20]]
        assert faults.failed
    assert file.read_bytes() == before
    assert "cannot be read now" in caplog.text
    assert "it stays as it is" in caplog.text


@pytest.mark.parametrize("name", ["a\0b", "\ud800", "."])
def test_no_file_can_have_such_a_name(paths, name):
    assert size_cache.scan_sizes(paths, name).sizes[0].tolist() == [10, 20]


def test_small_data_sets_are_not_kept_unasked(paths, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "cache"))
    assert size_cache.cache_file(paths, "auto") is None
    monkeypatch.setattr(size_cache, "AUTOMATIC_FROM", 6)
    file = size_cache.cache_file(paths, "auto")
    assert file is not None
    assert tmp_path / "cache" in file.parents
    assert size_cache.cache_file(paths, "off") is None


def test_a_cache_that_cannot_be_written_does_not_stop_training(paths, tmp_path):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    assert size_cache.scan_sizes(paths, str(tmp_path / "file" / "sizes.parquet")).sizes[0].tolist() == [10, 20]


def test_a_user_without_a_home_trains_without_kept_sizes(paths, monkeypatch, caplog):
    def home():
        raise RuntimeError("Could not determine home directory.")

    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.setattr(size_cache, "AUTOMATIC_FROM", 6)
    assert size_cache.scan_sizes(paths).sizes[0].tolist() == [10, 20]
    assert "no image sizes are kept: this user has no home folder" in caplog.text
