"""What a PyTorch loop meets beside the dataset: one image alone, ranges of pixels, open files, a sampler misplaced."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from kohya_bucket import BucketBatchSampler, BucketedDataset, BucketSet, FixedBuckets, StreamingBuckets
from kohya_bucket.buckets import Bucket
from kohya_bucket.datasets.items import BucketResize
from kohya_bucket.datasets.sources import at_rest
from kohya_bucket.errors import KohyaBucketError

SIZES = [(100, 60), (60, 100), (64, 64), (120, 50), (30, 30), (64, 128)]
SET = BucketSet.from_dims([(64, 64), (96, 64), (64, 96)])
RULE = FixedBuckets(SET)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    where = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(SIZES):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(where / f"{i}.png")
    return sorted(where.glob("*.png"))


@pytest.mark.parametrize("pixel_range", [(-1, 1), (0, 1)])
@pytest.mark.parametrize("interpolation", ["auto", "bicubic"])
def test_one_image_is_resized_as_in_a_data_set(paths, pixel_range, interpolation) -> None:
    options = {"pixel_range": pixel_range, "interpolation": interpolation}
    dataset = BucketedDataset(paths, RULE, **options)
    for i, path in enumerate(paths):
        item = dataset[i]
        with Image.open(path) as image:
            alone = BucketResize(item["bucket"], **options)(image)
        assert torch.equal(alone, item["image"])
        assert alone.min() >= pixel_range[0]
        assert alone.max() <= 1
        assert SET[item["bucket_idx"]] == item["bucket"]
    assert BucketResize(SET[0])(Image.new("L", (3, 200), 255)).unique().tolist() == [1]
    with pytest.raises(TypeError, match="image is a Tensor, but must be a Pillow image"):
        BucketResize(SET[0])(torch.zeros(3, 4, 4))
    assert "96x64" in repr(BucketResize(Bucket(96, 64)))


def test_ranges_are_the_same_pixels(paths) -> None:
    minus, zero = (BucketedDataset(paths, RULE, pixel_range=r)[0]["image"] for r in [(-1, 1), (0.0, 1.0)])
    assert torch.equal((zero - 0.5) / 0.5, minus)
    assert torch.equal((zero * 255).round() / 255, zero)
    samples = [{"image": path.read_bytes()} for path in paths]
    (batch,) = StreamingBuckets(samples[:1], RULE, 1, pixel_range=(0, 1))
    assert torch.equal(batch["image"][0], zero)
    for bad in [(0, 255), (1, 0), 1, "01", None]:
        with pytest.raises(KohyaBucketError, match="pixel_range is"):
            BucketedDataset(paths, RULE, pixel_range=bad)


def test_headers_are_read_without_workers(paths) -> None:
    assert BucketedDataset(paths, RULE, num_workers=0).sizes.tolist() == [list(size) for size in SIZES]
    with pytest.raises(KohyaBucketError, match="workers is -1"):
        BucketedDataset(paths, RULE, num_workers=-1)


def test_batches_have_bucket_numbers(paths) -> None:
    dataset = BucketedDataset(paths, RULE)
    sampler = BucketBatchSampler(dataset, 2)
    for batch in DataLoader(dataset, batch_sampler=sampler):
        assert [SET[k] for k in batch["bucket_idx"].tolist()] == batch["bucket"]
    assert sampler.bucket_indices is dataset.bucket_indices
    assert BucketBatchSampler([0, 1, 1], 2).bucket_indices.tolist() == [0, 1, 1]


@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"batch_size": 2}])
def test_a_batch_sampler_given_as_sampler_is_named(paths, options) -> None:
    dataset = BucketedDataset(paths, RULE)
    loader = DataLoader(dataset, sampler=BucketBatchSampler(dataset, 2), **options)
    with pytest.raises(KohyaBucketError, match=r"batch_sampler=sampler\) in place of sampler="):
        next(iter(loader))


def test_the_sampler_says_what_it_is() -> None:
    sampler = BucketBatchSampler([0, 0, 1], 2, num_replicas=2, rank=1, seed=5)
    assert repr(sampler) == (
        "<BucketBatchSampler n=3 batch_size=2 shuffle=True drop_last=False num_replicas=2 rank=1 seed=5 epoch=0>"
    )


def test_a_stream_says_what_it_is() -> None:
    stream = StreamingBuckets([], RULE, 4, buffer_size=20, num_replicas=2, rank=1)
    assert repr(stream) == (
        f"<StreamingBuckets batch_size=4 buffer_size=20 remainder='keep' num_replicas=2 rank=1 rule={RULE!r}>"
    )


def open_files() -> int:
    folder = next((f for f in (Path("/proc/self/fd"), Path("/dev/fd")) if f.is_dir()), None)
    if folder is None:
        pytest.skip("this system does not list a process' open files")
    return len(list(folder.iterdir()))


def test_a_stream_of_opened_images_holds_few_files(paths) -> None:
    before = open_files()
    most = 0

    def stream() -> Iterator[dict[str, Any]]:
        nonlocal most
        for i in range(120):
            yield {"image": Image.open(paths[i % 6])}
            most = max(most, open_files() - before)

    batches = list(StreamingBuckets(stream, RULE, 4, buffer_size=1000))
    assert sum(len(batch["image"]) for batch in batches) == 120
    assert most <= 3
    read = list(StreamingBuckets([{"image": p.read_bytes()} for p in paths] * 20, RULE, 4))
    assert all(torch.equal(a["image"], b["image"]) for a, b in zip(batches, read, strict=True))


@pytest.mark.further
def test_shards_are_closed_behind_the_stream(paths, tmp_path) -> None:
    pytest.importorskip("webdataset")
    import tarfile

    from kohya_bucket import dataset_from_shards, stream_from_shards

    for n in range(60):
        with tarfile.open(tmp_path / f"{n:02}.tar", "w") as tar:
            tar.add(paths[n % 6], f"{n}.png")
    before, most = open_files(), 0
    shards = [str(tmp_path / f"{n:02}.tar") for n in range(60)]
    for batch in stream_from_shards(shards, RULE, 2, caption=None, buffer_size=4):
        most = max(most, open_files() - before)
        assert len(batch["image"])
    assert most <= 3
    dataset = dataset_from_shards(shards, RULE, caption=None)
    assert {dataset[i]["image"].shape[0] for i in range(60)} == {3}
    assert open_files() - before <= 1


def test_what_waits_is_the_same_image(tmp_path) -> None:
    rng = np.random.default_rng(0)
    frames = [Image.fromarray(rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)) for _ in range(3)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].resize((500, 400)).save(tmp_path / "a.jpg")
    frames[0].save(tmp_path / "a.png", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0")

    def opened(name: str) -> Image.Image:
        image = Image.open(tmp_path / name)
        if name == "a.gif":
            image.seek(2)
        if name == "a.jpg":
            image.draft("RGB", (100, 100))
        return image

    for name in ("a.gif", "a.jpg", "a.png"):
        resting = at_rest(opened(name))
        assert getattr(resting, "fp", None) is None or isinstance(resting.fp, io.BytesIO)
        assert resting.size == opened(name).size
        assert (np.asarray(resting.convert("RGB")) == np.asarray(opened(name).convert("RGB"))).all()
    for cell in (b"bytes", "path", None, np.zeros((2, 2)), Image.new("L", (2, 2))):
        assert at_rest(cell) is cell
    (tmp_path / "cut.gif").write_bytes((tmp_path / "a.jpg").read_bytes()[:900])
    broken = Image.open(tmp_path / "cut.gif")
    with pytest.raises(OSError, match="truncated"):
        at_rest(broken).load()
