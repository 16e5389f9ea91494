"""The metadata cache: rows follow the files, and what has not changed is not opened."""

import errno
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_corpus import encode, exif, picture
from typer.testing import CliRunner

from kohya_bucket import cli
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images import Changes, ImageFormat, MetadataCache, ScanInterrupted, TextColumn, read_sizes
from kohya_bucket.images import headers as header_module
from kohya_bucket.images import metadata_cache as cache_module
from kohya_bucket.images import scan as pool_module
from kohya_bucket.images.sizes import SizeScan


def make(folder: Path, n: int = 6) -> list[Path]:
    paths = []
    for i in range(n):
        path = folder / f"{i}.{'png' if i % 2 else 'jpg'}"
        kind = "PNG" if i % 2 else "JPEG"
        path.write_bytes(encode(picture(size=(20 + i, 30 + i)), kind, exif=exif(1 + i % 8)))
        paths.append(path)
    return paths


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every image file that is opened."""
    seen: list[str] = []
    real = os.open

    def counted(path: str, *rest: object, **options: object) -> int:
        if str(path).endswith((".png", ".jpg")):
            seen.append(Path(path).name)
        return real(path, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(header_module.os, "open", counted)
    return seen


def equal(a: MetadataCache, b: MetadataCache) -> bool:
    return (
        list(a.paths) == list(b.paths)
        and all(
            np.array_equal(getattr(a, k), getattr(b, k))
            for k in ("sizes", "mtime_ns", "bytes", "formats", "orientation")
        )
        and a.reasons == b.reasons
        and ((a.hashes is None) == (b.hashes is None))
        and (a.hashes is None or b.hashes is None or np.array_equal(a.hashes, b.hashes))
    )


@pytest.mark.parametrize("hash", [False, True])
def test_load_returns_what_was_saved(tmp_path: Path, hash: bool) -> None:
    paths = make(tmp_path)
    (tmp_path / "broken ü.png").write_bytes(b"no")
    cache = MetadataCache.build([*paths, tmp_path / "broken ü.png"], hash=hash)
    assert cache.changes == Changes(0, 0, 7, 0, 1)
    cache.save(tmp_path / "deep" / "er" / "c.parquet")
    loaded = MetadataCache.load(tmp_path / "deep" / "er" / "c.parquet")
    assert equal(cache, loaded)
    row = loaded.get(paths[3])
    assert row is not None
    assert row[1:3] == (23, 33)
    assert (row.format, row.orientation, row.bytes) == (ImageFormat.PNG, 4, paths[3].stat().st_size)
    assert (row.hash is not None) == hash
    assert loaded.get_dim(paths[0]) == (20, 30)
    assert loaded.get_dim(tmp_path / "broken ü.png") is None
    assert "not an image" in str(loaded.get(tmp_path / "broken ü.png"))
    assert paths[0] in loaded
    assert "elsewhere.png" not in loaded
    assert sorted(p.name for p in (tmp_path / "deep" / "er").iterdir()) == ["c.parquet"]


def test_an_empty_cache_can_be_kept(tmp_path: Path) -> None:
    MetadataCache.build([]).save(tmp_path / "c.parquet")
    assert len(MetadataCache.load(tmp_path / "c.parquet")) == 0


def test_refresh_rereads_what_changed_adds_what_is_new_and_drops_what_is_gone(
    tmp_path: Path, opened: list[str]
) -> None:
    paths = make(tmp_path)
    cache = MetadataCache.build(paths)
    opened.clear()
    same = cache.refresh()
    assert opened == []
    assert same.changes == Changes(6, 0, 0, 0, 0)
    assert equal(cache, same)

    paths[1].write_bytes(encode(picture(size=(99, 98)), "PNG"))
    for path, when in ((paths[2], 10**18), (paths[3], 4 * 10**18)):  # before and after
        os.utime(path, ns=(when, when))
    paths[4].unlink()
    new = tmp_path / "new.png"
    new.write_bytes(encode(picture(), "PNG"))
    listed = [p for p in paths if p.exists()] + [new]
    after = cache.refresh(listed)
    assert sorted(opened) == ["1.png", "2.jpg", "3.png", "new.png"]
    assert after.changes == Changes(2, 3, 1, 1, 0)
    assert after.get_dim(paths[1]) == (99, 98)
    assert equal(after, MetadataCache.build(listed))


def test_unreadable_files_are_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"half a download")
    cache = MetadataCache.build([path, tmp_path / "missing.png"])
    assert set(cache.reasons) == {0, 1}
    assert cache.is_stale(path)
    assert cache.refresh().changes == Changes(0, 1, 0, 1, 1)


def test_only_what_is_certainly_gone_leaves_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make(tmp_path)
    cache, real = MetadataCache.build(paths), os.stat

    def stat(path: object, *rest: object, **options: object) -> os.stat_result:
        if str(path) == str(paths[2]):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *rest, **options)  # type: ignore[arg-type]

    paths[4].unlink()
    monkeypatch.setattr(os, "stat", stat)
    after = cache.refresh()
    assert list(after.paths) == [str(path) for path in paths if path != paths[4]]
    assert after.changes == Changes(4, 1, 0, 1, 0)


def test_hashes_are_kept_and_filled_in(tmp_path: Path) -> None:
    paths = make(tmp_path)
    paths[5].write_bytes(paths[3].read_bytes())
    hashed = MetadataCache.build(paths).refresh(hash=True)
    assert hashed.hashes is not None
    assert hashed.hashes[5] == hashed.hashes[3]
    assert len(set(hashed.hashes.tolist())) == 5
    paths[0].write_bytes(encode(picture(size=(50, 50)), "JPEG"))
    again = hashed.refresh()
    assert again.hashes is not None
    assert again.hashes[0] != hashed.hashes[0]
    assert (again.hashes[1:] == hashed.hashes[1:]).all()


def test_read_sizes_uses_a_cache_and_opens_nothing(
    tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make(tmp_path)
    plain = read_sizes(paths)
    cache = MetadataCache.build(paths)
    opened.clear()
    monkeypatch.chdir(tmp_path)
    scan = read_sizes([p.name for p in reversed(paths)], cached=cache)
    assert opened == []
    assert scan.paths[0] == "5.png"
    assert (scan.sizes == plain.sizes[::-1]).all()
    assert (scan.orientation == plain.orientation[::-1]).all()


def test_files_listed_twice_are_stored_once(tmp_path: Path) -> None:
    paths = make(tmp_path, 3)
    cache = MetadataCache.build([*paths, *paths])
    assert len(cache) == 6
    cache.save(tmp_path / "c.parquet")
    assert len(MetadataCache.load(tmp_path / "c.parquet")) == 3


@pytest.mark.posix("Windows names are always Unicode")
def test_a_name_that_is_no_unicode_is_read_but_not_stored(tmp_path: Path) -> None:
    odd = os.fsencode(tmp_path) + b"/\xff.png"
    try:
        Path(os.fsdecode(odd)).write_bytes(encode(picture(), "PNG"))
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    cache = MetadataCache.build([*make(tmp_path, 2), os.fsdecode(odd)])
    assert (cache.sizes > 0).all()
    cache.save(tmp_path / "c.parquet")
    assert len(MetadataCache.load(tmp_path / "c.parquet")) == 2


def test_other_programs_can_read_the_file(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    paths = make(tmp_path, 2)
    MetadataCache.build(paths).save(tmp_path / "c.parquet")
    rows = pq.read_table(tmp_path / "c.parquet").to_pylist()
    assert rows[1]["path"] == str(paths[1])
    assert (rows[1]["width"], rows[1]["height"], rows[1]["format"], rows[1]["reason"]) == (21, 31, "PNG", None)


@pytest.mark.posix("POSIX permissions")
def test_a_cache_is_as_public_as_other_files_and_no_thread_makes_more_public_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To ask for the user's mask is to change it for an instant, for all threads."""

    def refuse(mask: int) -> None:
        raise AssertionError("changes the mask")

    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", refuse)
        MetadataCache.build([]).save(tmp_path / "c.parquet")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert (tmp_path / "c.parquet").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["c.parquet"]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"no parquet at all" * 10])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "c.parquet").write_bytes(content)
    with pytest.raises(KohyaBucketError, match=r"c\.parquet.*build it again"):
        MetadataCache.load(tmp_path / "c.parquet")
    with pytest.raises(KohyaBucketError, match="no such metadata cache"):
        MetadataCache.load(tmp_path / "d.parquet")


def test_foreign_and_newer_files_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"path": ["a"]}), tmp_path / "c.parquet")
    with pytest.raises(KohyaBucketError, match="not a metadata cache"):
        MetadataCache.load(tmp_path / "c.parquet")
    MetadataCache.build(make(tmp_path, 1)).save(tmp_path / "c.parquet")
    table = pq.read_table(tmp_path / "c.parquet").replace_schema_metadata({"kohya_bucket_metadata_version": "2"})
    pq.write_table(table, tmp_path / "c.parquet")
    with pytest.raises(KohyaBucketError, match="newer version"):
        MetadataCache.load(tmp_path / "c.parquet")


def test_ctrl_c_keeps_the_finished_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make(tmp_path, 40)
    monkeypatch.setattr(pool_module, "_CHUNK", 10)
    monkeypatch.setattr(pool_module, "_REPORT_EVERY_S", 0.0)

    def interrupt(done: int, total: int) -> None:
        if done >= 20:
            raise KeyboardInterrupt

    with pytest.raises(ScanInterrupted) as caught:
        MetadataCache.build(paths, engine="alone", progress=interrupt)
    cache = caught.value.cache
    assert cache is not None
    assert len(cache) == 20
    cache.save(tmp_path / "c.parquet")
    assert MetadataCache.load(tmp_path / "c.parquet").refresh(paths).changes == Changes(20, 0, 20, 0, 0)


def test_ctrl_c_in_a_refresh_keeps_the_hashes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make(tmp_path)
    hashed = MetadataCache.build(paths, hash=True)
    os.utime(paths[5], ns=(1, 1))

    def interrupt(paths: list[str], **_: object) -> None:
        raise ScanInterrupted(SizeScan.unread(paths))

    monkeypatch.setattr(cache_module, "read_sizes", interrupt)
    with pytest.raises(ScanInterrupted) as caught:
        hashed.refresh()
    assert hashed.hashes is not None
    assert caught.value.cache.hashes.tolist() == hashed.hashes[:5].tolist()


def test_the_command_builds_and_refreshes(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    (folder / "broken.png").write_bytes(b"no")
    target = tmp_path / "data.cache.parquet"
    run = CliRunner().invoke
    first = run(cli.app, ["cache", "sizes", str(folder), "--output", str(target)])
    assert first.exit_code == 0, first.output
    assert "7 files" in first.output
    assert "7 new" in first.output
    assert "1 unreadable" in first.output
    assert "broken.png" in first.output
    second = run(cli.app, ["cache", "sizes", str(folder), "--output", str(target), "--refresh", "--hash"])
    assert "6 unchanged, 1 read again, 0 new" in second.output
    assert MetadataCache.load(target).hashes is not None
    nothing = run(cli.app, ["cache", "sizes", str(tmp_path / "absent"), "--output", str(target)])
    assert isinstance(nothing.exception, KohyaBucketError)


def test_an_interrupted_command_leaves_a_whole_cache_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, target = tmp_path / "data", tmp_path / "c.parquet"
    folder.mkdir()
    paths = make(folder)
    MetadataCache.build(paths, hash=True).save(target)
    before = target.read_bytes()

    def interrupt(*_: object, **__: object) -> None:
        interrupted = ScanInterrupted(SizeScan.unread([str(path) for path in paths]))
        interrupted.cache = some
        raise interrupted

    some = MetadataCache.build(paths[:2])
    monkeypatch.setattr(MetadataCache, "refresh", interrupt)
    result = CliRunner().invoke(cli.app, ["cache", "sizes", str(folder), "--output", str(target)])
    assert result.exit_code == 130
    assert "stays as it was: --refresh reads only what is new or changed" in result.output
    assert target.read_bytes() == before


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)), st.data())
def test_a_text_column_behaves_as_a_list(texts: list[str], data: st.DataObject) -> None:
    column = TextColumn.from_texts(texts)
    assert list(column) == texts
    assert len(column) == len(texts)
    start, stop, step = data.draw(st.slices(len(texts)).map(lambda s: (s.start, s.stop, s.step)))
    assert column[start:stop:step] == texts[start:stop:step]
    wanted = data.draw(st.lists(st.sampled_from(texts), max_size=5)) if texts else []
    assert column.find([*wanted, "\0"]).tolist() == [*(texts.index(t) for t in wanted), -1]
    assert column.is_first().tolist() == [text not in texts[:i] for i, text in enumerate(texts)]
    assert all(pickle.loads(pickle.dumps(column, p)) == column for p in range(2, 6))
    rows = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=5)) if texts else []
    assert list(column.take(np.array(rows, dtype=int))) == [texts[i] for i in rows]
    if texts:
        assert column[-1] == texts[-1]
    with pytest.raises(IndexError):
        column[len(texts)]


def test_equal_hashes_of_different_texts_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kohya_bucket.images.text_column.hash", len, raising=False)
    texts = ["aa", "bb", "c", "cc", "bb"]
    column = TextColumn.from_texts(texts)
    assert column.find(["cc", "bb", "dd", "c", "eee"]).tolist() == [3, 1, -1, 2, -1]
    assert column.is_first().tolist() == [True, True, True, True, False]


def test_a_full_disk_is_said_and_the_old_cache_stays(tmp_path: Path, no_room) -> None:
    images = make(tmp_path)
    file = no_room.folder / "meta.parquet"
    MetadataCache.build(images[:3]).save(file)
    before = file.read_bytes()
    larger = MetadataCache.build(images)
    with no_room.full(), pytest.raises(KohyaBucketError, match=f"meta.parquet: cannot be written: {no_room.reason}"):
        larger.save(file)
    assert file.read_bytes() == before
    assert [path.name for path in no_room.folder.iterdir()] == ["meta.parquet"]
    larger.save(file)
    assert len(MetadataCache.load(file)) == 6
