"""Images in S3, over its real protocol, from a server on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from image_corpus import corpus

from kohya_bucket.images import MetadataCache, list_images, read_sizes
from tests.object_storage import s3_server

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")

CORPUS = [*corpus(), ("broken.png", b"no")]


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server():
        storage = s3fs.S3FileSystem()
        storage.mkdir("photos")
        for name, data in CORPUS:
            storage.pipe(f"photos/set/{name}", data)
        yield "s3://photos/set"


def test_rows_are_those_of_the_same_files_on_disk(bucket: str, tmp_path: Path) -> None:
    for name, data in CORPUS:
        (tmp_path / name).write_bytes(data)
    urls = list_images(bucket)
    files = list_images(tmp_path)
    assert [url.rpartition("/")[2] for url in urls] == [Path(file).name for file in files]
    far, local = read_sizes(urls), read_sizes(files)
    assert len(far) > 20
    assert (far.sizes == local.sizes).all()
    assert (far.formats == local.formats).all()
    assert [(i, reason) for i, _, reason in far.failures] == [(i, reason) for i, _, reason in local.failures]


def test_a_refresh_reads_only_what_changed(bucket: str) -> None:
    urls = list_images(bucket)
    first = MetadataCache.build(urls)
    name = next(path for path in urls if path.endswith(".bmp"))
    data = next(data for known, data in CORPUS if name.endswith(f"/{known}"))
    s3fs.S3FileSystem().pipe(name, b"no image at all")
    s3fs.S3FileSystem.clear_instance_cache()
    again = first.refresh(urls)
    s3fs.S3FileSystem().pipe(name, data)  # for the other tests
    assert again.changes is not None
    assert again.changes.reread == 1 + len(first.reasons)
    assert name in [path for _, path, _ in again.scan().failures]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are not forked here")
def test_forked_loader_workers_read_it_too(bucket: str) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    from kohya_bucket import BucketedDataset, BucketSet, FixedBuckets

    urls = [f"{bucket}/RGB.png"] * 2
    dataset = BucketedDataset(urls, FixedBuckets(BucketSet.from_dims([(64, 40)])))
    loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="fork")
    assert torch.equal(next(iter(loader))["image"][1], dataset[0]["image"])
