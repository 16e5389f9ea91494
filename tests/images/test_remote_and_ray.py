"""Images behind URLs, and the same work on Ray: the rows are those of local files."""

import io
import json
import multiprocessing
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from image_corpus import corpus, encode, picture
from PIL import Image
from typer.testing import CliRunner

from kohya_bucket.errors import KohyaBucketError, UnreadableError
from kohya_bucket.images import MetadataCache, list_images, read_sizes
from kohya_bucket.images.origins import Origins
from kohya_bucket.images.remote import is_url
from kohya_bucket.latents.fingerprint import source_changes

CORPUS = [*corpus(), ("broken.png", b"no"), ("empty.jpg", b"")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in CORPUS:
        (tmp_path / name).write_bytes(data)
    return tmp_path


def test_memory_urls_give_the_rows_of_files(folder: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    for name, data in CORPUS:
        memory.pipe(f"/corpus/{name}", data)
    names = sorted(name for name, _ in CORPUS)
    local = read_sizes([folder / name for name in names])
    far = read_sizes([f"memory://corpus/{name}" for name in names])
    assert (far.sizes == local.sizes).all()
    assert (far.orientation == local.orientation).all()
    assert (far.formats == local.formats).all()
    assert [(i, reason) for i, _, reason in far.failures] == [(i, reason) for i, _, reason in local.failures]

    listed = list_images("memory://corpus")
    assert [url.rpartition("/")[2] for url in listed] == [Path(p).name for p in list_images(folder)]
    assert list_images("memory://corpus/*.webp") == [url for url in listed if url.endswith(".webp")]
    with pytest.raises(KohyaBucketError, match="no such file"):
        list_images("memory://absent")
    missing = read_sizes(["memory://corpus/absent.png"]).failures
    assert missing[0][2] == "no such file"


def test_patterns_far_away_find_what_they_find_here(tmp_path: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for name in (f"{folder}/{'a' * length}.png" for folder in ("1", "22", ".h") for length in range(1, 9)):
        memory.pipe(f"/lengths/{name}", b"")
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for pattern in ("[0-9]/*.png", "*/a*.png", "1/a?*.png", "?2/*.png", ".h/*", ".h/aaa*.png", "2*/aa.png", "*/*"):
        here = [Path(path).relative_to(tmp_path).as_posix() for path in list_images(f"{tmp_path}/{pattern}")]
        assert [url.partition("lengths/")[2] for url in list_images(f"memory://lengths/{pattern}")] == here != []


def test_what_is_named_like_a_pattern_is_found_by_its_name() -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    for name in ("pics [new]/a[1].png", "pics [new]/a1.png", "pics n/b.png"):
        memory.pipe(f"/named/{name}", b"")
    assert list_images("memory://named/pics [new]/a[1].png") == ["memory://named/pics [new]/a[1].png"]
    assert list_images("memory://named/pics [new]") == [
        "memory:///named/pics [new]/a1.png",
        "memory:///named/pics [new]/a[1].png",
    ]
    assert list_images("memory://named/pics [old]") == []
    memory.pipe("/named/a.png?signed=1", b"")
    assert list_images("memory://named/a.png?signed=1") == ["memory://named/a.png?signed=1"]


def test_images_in_an_archive_are_read_by_name_and_not_listed() -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    with memory.open("/packed/all.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        archive.writestr("sub/a.png", encode(picture(), "PNG"))
    address = "zip://{}::memory://packed/all.zip"
    assert read_sizes([address.format("sub/a.png")]).sizes.tolist() == [list(picture().size)]
    for name in ("sub", "sub/*.png"):
        with pytest.raises(KohyaBucketError, match="images in an archive are not listed: unpack it first"):
            list_images(address.format(name))


def test_a_server_that_does_not_say_how_long_its_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/chunked/a.png", encode(picture(), "PNG"))
    memory.pipe("/chunked/empty.png", b"")
    real = type(memory).info
    monkeypatch.setattr(type(memory), "info", lambda self, path, **more: real(self, path, **more) | {"size": None})
    scan = read_sizes(["memory://chunked/a.png", "memory://chunked/empty.png"])
    assert scan.sizes[0].tolist() == list(picture().size)
    assert [reason for _, _, reason in scan.failures] == ["an empty file (0 bytes)"]


@pytest.mark.parametrize("data", [dict(CORPUS)["big_icc.jpg"], encode(picture().resize((670, 450)), "BMP")])
def test_what_is_big_behind_a_url_is_not_read(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = fsspec.filesystem("memory")
    memory.pipe("/big/a.jpg", data)
    asked = []
    real = type(memory).cat_file

    def counted(self: object, path: str, start: int = 0, end: int = 0, **options: object) -> bytes:
        asked.append(end - start)
        return real(self, path, start, end, **options)

    monkeypatch.setattr(type(memory), "cat_file", counted)
    with Image.open(io.BytesIO(data)) as image:
        assert read_sizes(["memory://big/a.jpg"]).sizes.tolist() == [list(image.size)]
    assert sum(asked) < len(data) / 3


def test_a_cache_of_urls_is_refreshed_by_time_and_length(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    urls = [f"file://{folder}/{name}" for name in ("RGB.png", "baseline.jpg", "alpha.webp")]
    cache = MetadataCache.build(urls, hash=True)
    plain = MetadataCache.build([url.removeprefix("file://") for url in urls], hash=True)
    assert list(cache.paths) == urls
    assert (cache.sizes == plain.sizes).all()
    assert cache.hashes is not None
    assert plain.hashes is not None
    assert (cache.hashes == plain.hashes).all()
    assert cache.refresh(urls).changes == (3, 0, 0, 0, 0)
    os.utime(folder / "RGB.png", (1, 1))
    assert cache.refresh(urls).changes == (2, 1, 0, 0, 0)


def test_a_dataset_of_urls(folder: Path) -> None:
    pytest.importorskip("fsspec")
    torch = pytest.importorskip("torch")
    from kohya_bucket import BucketedDataset, BucketSet, FixedBuckets

    rule = FixedBuckets(BucketSet.from_dims([(64, 40)]))
    far = BucketedDataset([f"file://{folder}/RGB.png"], rule)
    near = BucketedDataset([folder / "RGB.png"], rule)
    assert torch.equal(far[0]["image"], near[0]["image"])


@pytest.mark.parametrize(
    "error", [RuntimeError("disconnected"), TimeoutError(), PermissionError("denied"), BlockingIOError(11, "busy")]
)
def test_storage_that_does_not_answer_changes_no_image(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """With numbers, without, and of types of their own, as libraries of storages raise them."""
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe("/same/a.png", b"12345")
    image = Origins.named(["memory://same/a.png"])
    stored = {"source_bytes": np.array([5]), "source_mtime_ns": np.array([1]), "source_hash": [image.hash(0)]}
    touched = {"source_bytes": np.array([5]), "source_mtime_ns": np.array([2])}
    assert source_changes(stored, touched, image.hash).tolist() == [0]

    def refuse(*_: object, **__: object) -> bytes:
        raise error

    monkeypatch.setattr(type(memory), "cat_file", refuse)
    with pytest.raises(UnreadableError, match=f"cannot be read now .*{error.args[-1] if error.args else 'Timeout'}"):
        source_changes(stored, touched, image.hash)
    error = FileNotFoundError("/same/a.png")
    assert source_changes(stored, touched, image.hash).tolist() != [0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_a_forked_process_has_a_storage_of_its_own(folder: Path) -> None:
    """Loader workers are forked, and s3fs, gcsfs and http refuse to be used in another process than their own."""
    fsspec = pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    class NotForkSafe(MemoryFileSystem):
        protocol = "notforksafe"

        def __init__(self, *args: object, **settings: object) -> None:
            super().__init__(*args, **settings)
            self._owner = os.getpid()

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return MemoryFileSystem._strip_protocol(path.replace("notforksafe://", "memory://"))

        def cat_file(self, *args: object, **settings: object) -> bytes:
            if os.getpid() != self._owner:
                raise RuntimeError("This class is not fork-safe")
            return super().cat_file(*args, **settings)

    fsspec.register_implementation("notforksafe", NotForkSafe, clobber=True)
    fsspec.filesystem("notforksafe").pipe("/forked/a.png", (folder / "RGB.png").read_bytes())
    urls = ["notforksafe://forked/a.png"]
    here = read_sizes(urls, engine="alone").sizes.tolist()
    assert here[0][0] > 0
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(sizes_of, (urls,)) == here


def sizes_of(urls: list[str]) -> list[list[int]]:
    return read_sizes(urls, engine="alone").sizes.tolist()


@pytest.mark.slow
def test_ray_gives_the_rows_of_the_local_pool(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    from kohya_bucket import cli

    local, ray = tmp_path / "local.parquet", tmp_path / "ray.parquet"
    for engine, target in (("local", local), ("ray", ray)):
        done = CliRunner().invoke(
            cli.app, ["cache", "sizes", str(folder), "-o", str(target), "--hash", "--engine", engine]
        )
        assert done.exit_code == 0, done.output
    a, b = MetadataCache.load(local), MetadataCache.load(ray)
    assert list(a.paths) == list(b.paths)
    for column in ("sizes", "mtime_ns", "bytes", "formats", "orientation", "hashes"):
        assert np.array_equal(getattr(a, column), getattr(b, column)), column
    assert a.reasons == b.reasons


@pytest.mark.slow
def test_analyze_on_ray_says_what_it_says_locally(folder: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install ray")
    from kohya_bucket import cli

    said = []
    for engine in ("local", "ray"):
        done = CliRunner().invoke(cli.app, ["analyze", str(folder), "--preset", "sdxl", "--json", "--engine", engine])
        assert done.exit_code == 0, done.output
        said.append(json.loads(done.stdout))
    assert said[0] == said[1]


def test_an_unknown_engine_is_named(folder: Path) -> None:
    from kohya_bucket import cli

    done = CliRunner().invoke(cli.app, ["cache", "sizes", str(folder), "-o", "x.parquet", "--engine", "spark"])
    assert "--engine is 'spark'" in str(done.exception)


@pytest.mark.parametrize("text", ["s3://bucket/a", "file:///a", "hf://x", "simplecache::s3://bucket/a"])
def test_addresses(text: str) -> None:
    assert is_url(text)


@pytest.mark.parametrize(
    "text",
    ["C://images/a", "c:/images", "D:\\images", "\\\\server\\share", "//server/share", "s3:/a", "/a/http://b", "://a"],
)
def test_paths_that_are_no_addresses(text: str) -> None:
    assert not is_url(text)
