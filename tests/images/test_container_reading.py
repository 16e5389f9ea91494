"""Images in tars and tables by their names: which one, how often a file is read for it, and never another one."""

import errno
import io
import os
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from kohya_bucket.errors import KohyaBucketError, UnreadableError
from kohya_bucket.images import TextColumn, image_rows, parallel, remote
from kohya_bucket.images.image_rows import scan_rows
from kohya_bucket.images.origins import Container, Origins, apart, container_of
from kohya_bucket.images.parallel import check_cancelled, for_each
from kohya_bucket.images.stamps import stamp_of
from kohya_bucket.images.tar_index import ROW, TarIndex
from kohya_bucket.latents.store.layout import absolute, paths_of, relative_source
from tests.latents.containers import make_table, make_tar
from tests.object_storage import s3_server


def png(color: int, size: tuple[int, int] = (3, 2)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (color % 256, color // 256, 7)).save(out, "PNG")
    return out.getvalue()


def rows(images: list[bytes | None]) -> list[dict]:
    return [
        {"id": k, "image": None if data is None else {"bytes": data, "path": None}, "text": None}
        for k, data in enumerate(images)
    ]


@pytest.mark.parametrize(("name", "container"), [
    ("/d/x.tar#a/b.c", Container("/d/x.tar")),
    ("/d/X.TAR#a", Container("/d/X.TAR")),
    ("/d/part.parquet#17", Container("/d/part.parquet", column="image")),
    ("/d/part.parquet#before/17", Container("/d/part.parquet", column="before")),
    ("/d/part.parquet#a/b/17", Container("/d/part.parquet", column="a/b")),
    (r"C:\x\part.parquet#3", Container(r"C:\x\part.parquet", column="image")),
    (r"C:\x y\shard-0.tar#dir/img_1", Container(r"C:\x y\shard-0.tar")),
    ("s3://b/x.tar#img", Container("s3://b/x.tar")),
    ("hf://datasets/a/b/data/t.parquet#0", Container("hf://datasets/a/b/data/t.parquet", column="image")),
    ("/d/photo #1.png", None),
    ("/d/part.parquet#x", None),
    ("/d/x.tar", None),
    ("/d/x.tar#", None),
    ("/d/x.tart#a", None),
])  # fmt: skip
def test_a_name_says_which_container(name: str, container: Container | None) -> None:
    assert container_of(name) == container
    if container is not None:
        assert apart(name) == (container.path, name[len(container.path) :])


def test_a_file_with_such_a_name_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x.tar#1").mkdir()
    for name in ("a.tar#b.png", "p.parquet#3", "x.tar#1/c.png"):
        (tmp_path / name).write_bytes(png(1))
        images = Origins.named([str(tmp_path / name)])
        assert (images.container.tolist(), images.containers, container_of(images.names[0])) == ([-1], (), None)
        assert images.pixels(0).shape == (2, 3, 3)
        assert paths_of(relative_source(images.names, tmp_path), tmp_path) == images.names


@pytest.mark.parametrize("key", ["a", "./a", "../a", "../../../a", "d//a", "d/./a", "d/../a", "é ü/#1"])
def test_names_of_samples_come_back_as_they_are(tmp_path: Path, key: str) -> None:
    tar = make_tar(tmp_path / "sub.tar", [(f"{key}.png", png(5))])
    images, again = Origins.of_tars(TarIndex.build([str(tar)]))
    assert (images.names, again) == ([f"{tar}#{key}"], {})
    for root in (tmp_path, tmp_path / "elsewhere"):
        (source,) = relative_source(images.names, root)
        assert source.endswith(f"sub.tar#{key}")
        assert paths_of([source], root) == images.names
    assert absolute(images.names[0]) == images.names[0]
    assert Origins.named(images.names).fetched(0) == images.fetched(0) == png(5)


def changed(path: Path, data: bytes) -> None:
    """As another program writes it; the time is another, however quick this is."""
    before = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(before + 500, before + 500))


def made(folder: Path, kind: str, images: list[bytes]) -> Path:
    if kind == "tar":
        return make_tar(folder / "x.tar", [(f"{k}.png", data) for k, data in enumerate(images)])
    return make_table(folder / "x.parquet", rows(images), plain=kind == "plain")


@pytest.mark.parametrize("kind", ["tar", "parquet", "plain"])
def test_what_has_changed_is_read_anew_by_name_and_refused_by_what_was_known(tmp_path: Path, kind: str) -> None:
    first, second = ([png(k + start) for k in range(20)] for start in (0, 100))
    assert len({len(data) for data in first + second}) == 1
    file = made(tmp_path, kind, first)
    names = [f"{file}#{k}" for k in range(20)]
    if kind == "tar":
        known, _ = Origins.of_tars(TarIndex.build([str(file)]))
    else:
        found = scan_rows("image", None, str(file))
        known = Origins.of_rows([Container(str(file), found.stamp, "image")], [found])
    assert known.names == names
    assert [known.fetched(k) for k in range(20)] == first
    by_name = Origins.named(names)
    assert [by_name.fetched(k) for k in (7, 3, 19, 0)] == [first[k] for k in (7, 3, 19, 0)]
    (tmp_path / "new").mkdir()
    changed(file, made(tmp_path / "new", kind, second[::-1]).read_bytes())
    assert [by_name.fetched(k) for k in range(20)] == second[::-1]
    assert {by_name.hash(k) for k in range(20)}.isdisjoint({known.hash(0)} if kind in ("parquet", "plain") else set())
    nbytes, mtimes = by_name.stamps()
    assert list(zip(nbytes.tolist(), mtimes.tolist(), strict=True)) == [stamp_of(str(file))] * 20
    image_rows._part_cache._parts.clear()  # of the file that was: its rows are true
    image_rows._reader.cache_clear()
    with pytest.raises(KohyaBucketError, match="changed since it was scanned"):
        known.fetched(12)
    assert known.hashes() == [""] * 20
    image_rows._reader.cache_clear()
    file.unlink()
    assert by_name.stamps()[0].tolist() == [-1] * 20
    with pytest.raises(UnreadableError, match=rf"is gone, or empty: {file.name} cannot be read"):
        by_name.pixels(7)


@pytest.mark.parametrize(("kind", "name"), [("tar", "x"), ("parquet", "9")])
def test_a_name_without_an_image_is_said(tmp_path: Path, kind: str, name: str) -> None:
    file = made(tmp_path, kind, [png(1)])
    with pytest.raises(KohyaBucketError, match=r"has no row 9, but 1 row|has no image of the name"):
        Origins.named([f"{file}#{name}"]).fetched(0)


def test_cells_without_an_image(tmp_path: Path) -> None:
    images = [None, png(1, (30, 20)), None, b"", b"no image", png(2)]
    for file in (
        make_table(tmp_path / "a.parquet", rows(images)), make_table(tmp_path / "b.parquet", rows(images), plain=True),
    ):  # fmt: skip
        found = scan_rows("image", None, str(file))
        assert found.sizes.tolist() == [[0, 0], [30, 20], [0, 0], [0, 0], [0, 0], [3, 2]], file
        assert sorted(found.reasons) == [0, 2, 3, 4]
        assert found.lengths.tolist() == [len(data or b"") for data in images]
        known = Origins.of_rows([Container(str(file), found.stamp, "image")], [found])
        assert [known.fetched(k) for k in (5, 1, 4)] == [images[k] for k in (5, 1, 4)]
    assert scan_rows("image", None, str(make_table(tmp_path / "e.parquet", []))).sizes.shape == (0, 2)


def test_reads_grow_as_the_rows_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted: reads of a tar, and parts of a Parquet file that are decoded."""
    some = [png(k) for k in range(64)]
    counts: dict[str, list[int]] = {"tar": [], "parquet": []}
    asked: list[int] = []
    monkeypatch.setattr(remote, "read_at", lambda *args, real=remote.read_at: asked.append(1) or real(*args))
    real = image_rows.ParquetRows.parts
    monkeypatch.setattr(
        image_rows.ParquetRows, "parts", lambda self, group: (asked.append(1) or part for part in real(self, group))
    )
    for n in (500, 2_000):
        images = [some[k % 64] for k in range(n)]
        tar = make_tar(tmp_path / f"{n}.tar", ((f"{k}.png", data) for k, data in enumerate(images)))
        table = make_table(tmp_path / f"{n}.parquet", rows(images))
        asked.clear()
        index = TarIndex.build([str(tar)])
        assert len(index) == n
        counts["tar"].append(len(asked))
        asked.clear()
        found = scan_rows("image", None, str(table))
        known = Origins.of_rows([Container(str(table), found.stamp, "image")], [found])
        order = np.random.default_rng(0).permutation(n)  # as buckets are read
        assert all(known.fetched(int(i)) == images[i] for i in order)
        counts["parquet"].append(len(asked))
    assert counts["parquet"] == [2 * -(-500 // 16), 2 * -(-2_000 // 16)]
    assert 500 <= counts["tar"][0] <= 2 * 500 + 10
    assert counts["tar"][1] - 4 * counts["tar"][0] < 10


@pytest.mark.long
def test_memory_does_not_grow_with_a_row_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    images = [png(k) + random.bytes(1 << 16) for k in range(1_000)]
    table = make_table(tmp_path / "x.parquet", rows(images), row_group_size=1_000, write_batch_size=16)
    monkeypatch.setattr(image_rows, "_part_cache", image_rows._PartCache())
    monkeypatch.setattr(image_rows, "_MOST_CACHED", 4 << 20)
    del random
    before, peak = pa.total_allocated_bytes(), 0
    real = image_rows.ParquetRows.parts

    def watched(self, group):
        nonlocal peak
        for part in real(self, group):
            peak = max(peak, pa.total_allocated_bytes() - before)
            yield part

    monkeypatch.setattr(image_rows.ParquetRows, "parts", watched)
    found = scan_rows("image", None, str(table))
    assert found.lengths.sum() > 60 << 20
    assert 1 << 20 < peak < 8 << 20
    known = Origins.of_rows([Container(str(table), found.stamp, "image")], [found])
    assert all(known.fetched(k) == images[k] for k in range(1_000))
    assert peak < 12 << 20
    image_rows._reader.cache_clear()


@pytest.mark.parametrize(
    "kind",
    [pa.binary(), pa.large_binary(), *([pa.binary_view()] if int(pa.__version__.split(".")[0]) > 20 else [])],
    ids=str,
)
@pytest.mark.parametrize("inside", [False, True], ids=["plain", "struct"])
def test_every_type_of_bytes_is_read(tmp_path: Path, kind: pa.DataType, inside: bool) -> None:
    images = [png(k) for k in range(5)]
    column = pa.array(images, kind)
    if inside:
        column = pa.StructArray.from_arrays([column, pa.nulls(5, pa.string())], ["bytes", "path"])
    made = pa.table({"image": column, "text": pa.array(list("abcde"), pa.large_string())})
    pa.parquet.write_table(made, tmp_path / "x.parquet")
    file = str(tmp_path / "x.parquet")
    found = scan_rows("image", "text", file)
    assert found.captions == list("abcde")
    known = Origins.of_rows([Container(file, found.stamp, "image")], [found])
    assert [known.fetched(k) for k in (4, 0, 2)] == [images[k] for k in (4, 0, 2)]


def test_after_a_read_that_failed_the_next_one_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [png(k) for k in range(100)]
    table = make_table(tmp_path / "x.parquet", rows(images))
    real = image_rows.ParquetRows.parts

    def failing(self, group):
        for k, part in enumerate(real(self, group)):
            if k == 2:
                raise OSError("the network is gone")
            yield part

    by_name = Origins.named([f"{table}#{k}" for k in range(100)])
    with monkeypatch.context() as patch:
        patch.setattr(image_rows.ParquetRows, "parts", failing)
        assert by_name.fetched(20) == images[20]
        for row in (40, 99):
            with pytest.raises(KohyaBucketError, match=r"x\.parquet: cannot be read as a table: the network is gone"):
                by_name.fetched(row)
    assert [by_name.fetched(k) for k in (99, 40, 0)] == [images[k] for k in (99, 40, 0)]


def test_windows_keep_neighbours_together() -> None:
    lengths = np.full(100, 10 << 20, np.int64)
    found = image_rows.ScannedRows((1, 1), np.zeros((100, 2), np.int32), lengths, {})
    images = Origins.of_rows([Container("/x.parquet", (1, 1), "image")], [found])
    windows = images.windows()
    assert (np.diff(windows) >= 0).all()
    assert max(np.bincount(windows)) * (10 << 20) <= image_rows._MOST_CACHED
    far = Origins.named(["/a.png", "/b.tar#1"])
    assert far.windows().tolist() == [0, 0]


def test_many_items_are_done_in_order_and_an_error_stops_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_QUEUED", 7)
    asked: list[int] = []
    assert for_each(lambda i: asked.append(i) or i * i, range(50)) == [i * i for i in range(50)]
    assert sorted(asked) == list(range(50))
    asked.clear()

    def failing(i: int) -> None:
        asked.append(i)
        if i == 10:
            raise KohyaBucketError("broken")

    with pytest.raises(KohyaBucketError, match="broken"):
        for_each(failing, range(10_000))
    assert max(asked) < 14  # those that wait behind are not begun
    assert for_each(len, []) == []


def test_an_error_or_ctrl_c_ends_what_runs_beside() -> None:
    ended = []

    def look(item: int) -> int:
        if item == 1:
            raise KohyaBucketError("broken")
        try:
            while True:
                check_cancelled()
                threading.Event().wait(0.01)
        finally:
            ended.append(item)

    with pytest.raises(KohyaBucketError, match="broken"):
        for_each(look, [1, 2, 3, 4])

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for_each(lambda item: item if item == 0 else look(item), [0, 2, 3], progress=interrupt)
    assert set(ended) <= {2, 3, 4}
    check_cancelled()  # nothing is left behind here


def test_an_object_that_is_replaced_is_noticed_within_the_same_second(tmp_path: Path) -> None:
    with s3_server():
        import s3fs

        bucket = s3fs.S3FileSystem()
        bucket.mkdir("here")
        tars = [make_tar(tmp_path / f"{k}.tar", [("a.png", png(k))]) for k in range(2)]
        bucket.put_file(str(tars[0]), "here/x.tar")
        url = "s3://here/x.tar"
        bucket.ls("here")  # which the client keeps
        images, _ = Origins.of_tars(TarIndex.build([url]))
        assert images.fetched(0) == png(0)
        before = stamp_of(url)
        s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True).put_file(str(tars[1]), "here/x.tar")
        assert tars[0].stat().st_size == tars[1].stat().st_size
        assert stamp_of(url) != before
        with pytest.raises(KohyaBucketError, match="has changed"):
            images.fetched(0)
        assert Origins.named([f"{url}#a"]).fetched(0) == png(1)


def test_a_table_that_claims_more_rows_than_its_bytes_can_hold_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pa.parquet.write_table(pa.table({"image": pa.nulls(3_000_000, pa.binary())}), path)
    with pytest.raises(KohyaBucketError, match=r"x\.parquet: claims 3,000,000 rows in"):
        scan_rows("image", None, str(path))


class CountedRows(np.ndarray):
    """Rows that count how often a whole column of them is taken."""

    taken = 0

    def __getitem__(self, key):
        CountedRows.taken += key == "shard" if isinstance(key, str) else 0
        return super().__getitem__(key)


def test_an_earlier_index_is_gone_through_once_and_not_once_a_shard(tmp_path):
    files = [tmp_path / f"{i}.tar" for i in range(30)]
    for file in files:
        file.write_bytes(b"not opened")
    stamps = [stamp_of(str(file)) for file in files]
    rows = np.zeros(60, ROW)
    rows["shard"], rows["offset"] = np.repeat(np.arange(30), 2), np.arange(60)
    keys = TextColumn.from_texts(map(str, range(60)))
    before = TarIndex([*map(str, files)], stamps, keys, rows.view(CountedRows), {59: "broken"}, "txt")
    again = TarIndex.build(files[:0:-1], caption="txt", before=before)
    assert again.rows["offset"].tolist() == [i for shard in range(29, 0, -1) for i in (2 * shard, 2 * shard + 1)]
    assert list(again.keys) == list(map(str, again.rows["offset"].tolist()))
    assert again.rows["shard"].tolist() == np.repeat(np.arange(29), 2).tolist()
    assert again.reasons == {1: "broken"}
    assert CountedRows.taken < 10


def test_a_shard_that_cannot_be_looked_at_now_has_not_changed(tmp_path, monkeypatch):
    index = TarIndex.build([str(make_tar(tmp_path / "a.tar", [("a.png", png(1))]))], caption=None)
    assert index.is_current()
    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", refusing)
        with pytest.raises(UnreadableError, match="run again"):
            index.is_current()
    (tmp_path / "a.tar").unlink()
    assert not index.is_current()


def refusing(path, **_):
    raise OSError(errno.EIO, os.strerror(errno.EIO), path)
