"""Batches from a stream: one bucket each, every image accounted for, memory bounded."""

import io
import itertools
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader

from kohya_bucket import BucketSet, FixedBuckets, KohyaBuckets
from kohya_bucket.buckets import Bucket
from kohya_bucket.datasets import streaming
from kohya_bucket.datasets.agreement import Meeting, MeetingPlace, meeting
from kohya_bucket.datasets.sources import content_of
from kohya_bucket.datasets.streaming import StreamBuffer, StreamingBuckets
from kohya_bucket.errors import KohyaBucketError, PlanError, UnreadableError
from kohya_bucket.planning.fingerprint import RanksDifferError
from tests.pictures import make_pictures
from tests.warm import QUICK

RULE = FixedBuckets(BucketSet.from_dims([(16, 16), (24, 16), (16, 24)]))
SIZES = [(18, 17), (30, 20), (20, 30)]
BUCKETS = [Bucket(16 * k, 16) for k in range(1, 5)]


def encoded(size: tuple[int, int], value: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (value % 256, value // 256, 0)).save(out, "PNG")
    return out.getvalue()


class Stream:
    """Re-iterable, picklable; sample i is one flat image whose colour is its number."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rng = np.random.default_rng(5)
        for i in range(self.n):
            yield {"image": encoded(SIZES[rng.integers(3)], i), "text": f"caption {i}", "key": f"k{i}"}


def numbers(batch: dict[str, Any]) -> list[int]:
    pixels = ((batch["image"][:, :, 0, 0] + 1) * 127.5).round().long()
    return (pixels[:, 0] + 256 * pixels[:, 1]).tolist()


@given(
    st.lists(st.integers(0, 3), max_size=120),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 30),
    st.sampled_from(["keep", "pad", "drop"]),
    st.one_of(st.none(), st.integers(0, 5)),
)
def test_buffer_laws(ids: list[int], size: int, ranks: int, extra: int, remainder: str, seed: int | None) -> None:
    rng = None if seed is None else np.random.RandomState(seed)
    capacity = size * ranks + extra
    buffer: StreamBuffer[int] = StreamBuffer(size, ranks, capacity, remainder, rng)
    most = 0
    seen: Counter[int] = Counter()

    def watched() -> Iterator[tuple[Bucket, int]]:
        nonlocal most
        for number, k in enumerate(ids):
            most = max(most, number - len(seen) - buffer.counts.dropped)  # held when it asks for more
            yield BUCKETS[k], number

    for bucket, of_ranks in buffer.batches(watched()):
        batch = [i for images in of_ranks for i in images]
        assert {BUCKETS[ids[i]] for i in batch} == {bucket}
        lengths = [len(images) for images in of_ranks]
        assert len(lengths) == ranks
        assert 0 < min(lengths) <= max(lengths) <= min(size, min(lengths) + 1)
        if remainder != "keep":
            assert len(batch) == size * ranks
        seen.update(batch)
    counts = buffer.counts
    assert most <= capacity
    assert len(seen) == counts.trained
    assert counts.trained + counts.dropped == len(ids)
    assert sum(seen.values()) - len(seen) == counts.repeated
    if remainder != "drop":
        assert set(seen) == set(range(len(ids)))


def test_batches_are_those_of_a_bucketed_dataset() -> None:
    stream = StreamingBuckets(
        Stream(100), RULE, 4, caption_column="text", name_column="key", buffer_size=40, remainder="keep"
    )
    seen = []
    for batch in DataLoader(stream, batch_size=None):
        bucket = batch["bucket"][0]
        assert batch["bucket"] == [bucket] * len(batch["image"])
        assert batch["image"].shape[1:] == (3, bucket.height, bucket.width)
        assert batch["caption"] == [f"caption {i}" for i in numbers(batch)]
        assert batch["path"] == [f"k{i}" for i in numbers(batch)]
        assert batch["original_size"].shape == (len(batch["image"]), 2)
        seen += numbers(batch)
    assert sorted(seen) == list(range(100))
    assert seen != sorted(seen)
    assert stream.counts.trained == 100


@pytest.mark.long
def test_the_order_follows_seed_and_epoch() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        stream = StreamingBuckets(Stream(60), RULE, 4, seed=seed, buffer_size=30)
        stream.set_epoch(epoch)
        return [numbers(b) for b in stream]

    assert order(1, 0) == order(1, 0)
    assert order(1, 0) != order(1, 1)
    assert order(1, 0) != order(2, 0)


def test_without_shuffling_batches_leave_in_the_order_of_arrival() -> None:
    batches = [numbers(b) for b in StreamingBuckets(Stream(60), RULE, 4, shuffle=False)]
    assert all(batch == sorted(batch) for batch in batches)
    completed = [batch[-1] for batch in batches if len(batch) == 4]
    assert completed == sorted(completed)


def read_by_ranks(folder: Path, streams: list[Any], **options: Any) -> list[list[dict[str, Any]]]:
    """What each rank reads of its stream; ranks are threads here, which meet in a file."""

    def read(rank: int) -> list[dict[str, Any]]:
        stream = StreamingBuckets(streams[rank], RULE, 4, num_replicas=len(streams), rank=rank, **options)
        stream._place = MeetingPlace((len(streams), rank), 60, str(folder / "meeting"))
        stream._number = 0  # the first that a process makes
        return list(stream)

    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(read, range(len(streams))))


def test_a_cell_with_an_empty_path_ends_no_comparison(tmp_path: Path) -> None:
    make_pictures(tmp_path, [(64, 64)] * 4)
    rows = [{"image": ""}, *({"image": str(tmp_path / f"{i}.png")} for i in range(4))]
    trained = read_by_ranks(tmp_path, [rows, rows], name_column="image")
    assert sum(len(batch["path"]) for batches in trained for batch in batches) == 4


def test_two_streams_at_once_are_each_compared_with_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the workers of two loaders in one loop: which of them comes first is another one on each rank."""
    streams: dict[tuple[int, int], StreamingBuckets] = {}
    for rank in range(2):
        monkeypatch.setattr(streaming, "_made", itertools.count())
        StreamingBuckets(Stream(8), RULE, 4, num_replicas=1, rank=0)  # one that a rank reads alone
        for which, length in enumerate((24, 40)):
            made = streams[rank, which] = StreamingBuckets(Stream(length), RULE, 4, num_replicas=2, rank=rank)
            made._place = MeetingPlace((2, rank), 60, str(tmp_path / "meeting"))
    names: dict[str, set[int]] = {}

    def called(place: MeetingPlace, name: str) -> Meeting | None:
        names.setdefault(name, set()).add(place.world[1])
        return meeting(place, name)

    monkeypatch.setattr(streaming, "meeting", called)
    in_this_order = [(0, 1), (1, 0), (0, 0), (1, 1)]
    with ThreadPoolExecutor(4) as pool:
        read = pool.map(lambda one: sum(len(numbers(batch)) for batch in streams[one]), in_this_order)
        trained = dict(zip(in_this_order, read, strict=True))
    assert [trained[0, which] + trained[1, which] for which in (0, 1)] == [24, 40]
    assert list(names.values()) == [{0, 1}] * 2


def test_ranks_that_cannot_compare_what_they_read_are_refused() -> None:
    """They were given by hand: a stream that is shuffled on each of them would be trained in part."""
    stream = StreamingBuckets(Stream(60), RULE, 2, num_replicas=2, rank=0)
    for workers in (0, 1):
        context = QUICK if workers else None
        loader = DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context)
        with pytest.raises(PlanError, match=r"num_replicas is 2, but there is no process group"):
            next(iter(loader))
    assert len(list(StreamingBuckets(Stream(8), RULE, 8, num_replicas=1, rank=0))) > 0


def test_images_of_a_stream_are_told_apart_by_their_folders_too(tmp_path: Path) -> None:
    """Ranks that list two folders in another order read the same last parts of paths in the same order."""
    rows = []
    for machine in "xy":
        for part in "ab":
            make_pictures(tmp_path / machine / part, [(64, 64)] * 4)
        rows.append([{"image": str(tmp_path / machine / part / f"{i}.png")} for part in "ab" for i in range(4)])
    elsewhere = read_by_ranks(tmp_path, rows, name_column="image")
    trained = sorted("/".join(Path(path).parts[-2:]) for batches in elsewhere for b in batches for path in b["path"])
    assert trained == [f"{part}/{i}.png" for part in "ab" for i in range(4)]
    with pytest.raises(RanksDifferError, match="what the images are, in their order"):
        read_by_ranks(tmp_path / "x", [rows[0], rows[1][4:] + rows[1][:4]])


@pytest.mark.long
@pytest.mark.parametrize("remainder", ["keep", "pad", "drop"])
def test_all_ranks_train_one_bucket_per_step_and_as_many_steps(remainder: str, tmp_path: Path) -> None:
    ranks = read_by_ranks(tmp_path, [Stream(101)] * 3, buffer_size=48, remainder=remainder)
    assert len({len(batches) for batches in ranks}) == 1
    seen: Counter[int] = Counter()
    for step in zip(*ranks, strict=True):
        assert len({(batch["bucket"][0], batch["image"].shape[1:]) for batch in step}) == 1
        for batch in step:
            seen.update(numbers(batch))
    if remainder == "drop":
        assert max(seen.values()) == 1
    else:
        assert set(seen) == set(range(101))


@pytest.mark.long
def test_workers_share_the_stream() -> None:
    loader = DataLoader(
        StreamingBuckets(Stream(50), RULE, 3, buffer_size=20), batch_size=None, num_workers=2,
        multiprocessing_context=QUICK,
    )  # fmt: skip
    assert sorted(i for batch in loader for i in numbers(batch)) == list(range(50))


def test_a_function_makes_a_new_pass_each_time() -> None:
    stream = StreamingBuckets(lambda: (sample for sample in Stream(20)), KohyaBuckets(16, 8, 32, 8, no_upscale=True), 2)
    for _ in range(2):
        assert sorted(i for batch in stream for i in numbers(batch)) == list(range(20))


def test_broken_images_are_named_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    samples = [{"image": b"broken"}, *Stream(5), {"image": None}]
    stream = StreamingBuckets(samples, RULE, 2)
    assert sorted(i for batch in stream for i in numbers(batch)) == list(range(5))
    assert (stream.counts.trained, stream.counts.unplaced) == (5, 2)
    assert "stream:0 has no bucket and is not trained: not an image" in caplog.text


@pytest.mark.parametrize("opened", [bytes, lambda encoded: Image.open(io.BytesIO(encoded))], ids=["bytes", "Pillow"])
def test_pixels_that_cannot_be_read_are_left_out_of_a_stream(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    samples = list(Stream(6))
    samples[3] = {**samples[3], "image": samples[3]["image"][:-40]}
    samples = [{**sample, "image": opened(sample["image"])} for sample in samples]
    rule = FixedBuckets(BucketSet.from_dims([(16, 16)]))
    stream = StreamingBuckets(samples, rule, 3, shuffle=False, name_column="key")
    batches = [numbers(batch) for batch in stream]
    assert [len(batch) for batch in batches] == [3, 3]
    assert {number for batch in batches for number in batch} == {0, 1, 2, 4, 5}
    assert (stream.counts.trained, stream.counts.repeated, stream.counts.left_out) == (5, 1, 1)
    assert "is left out" in caplog.text
    with pytest.raises(KohyaBucketError):
        list(StreamingBuckets(samples, rule, 3, shuffle=False, on_bad_image="stop"))


@pytest.mark.parametrize("address", ["memory://stream/{}.png", "zip://{}.png::memory://stream/all.zip"])
def test_images_at_addresses_are_fetched(address: str) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.pipe({f"/stream/{i}.png": sample["image"] for i, sample in enumerate(Stream(5))})
    with memory.open("/stream/all.zip", "wb") as file, zipfile.ZipFile(file, "w") as archive:
        for i in range(5):
            archive.writestr(f"{i}.png", memory.cat_file(f"/stream/{i}.png"))
    samples = [{"image": {"bytes": None, "path": address.format(i)}} for i in range(5)]
    stream = StreamingBuckets(samples, RULE, 2, on_bad_image="stop")
    assert sorted(i for batch in stream for i in numbers(batch)) == list(range(5))
    assert len({content_of(sample["image"]) for sample in samples}) == 5  # by which ranks compare what they read


def test_mistakes_are_named() -> None:
    with pytest.raises(KohyaBucketError, match="buffer_size=3 does not hold one batch of 4 x 1"):
        StreamingBuckets(Stream(5), RULE, 4, buffer_size=3)
    with pytest.raises(KohyaBucketError, match=r"remainder is 'lose'.* keep, pad, drop$"):
        StreamingBuckets(Stream(5), RULE, 4, remainder="lose")
    with pytest.raises(KohyaBucketError, match="rank is 2, but with num_replicas=2 must be 0 to 1"):
        StreamingBuckets(Stream(5), RULE, 4, num_replicas=2, rank=2)
    with pytest.raises(KohyaBucketError, match="has no 'picture', only image, text, key"):
        next(iter(StreamingBuckets(Stream(5), RULE, 4, image_column="picture")))


@pytest.mark.further
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_hugging_face_stream(workers: int) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    rows = list(Stream(40))
    table = {"image": [{"bytes": r["image"], "path": None} for r in rows], "text": [r["text"] for r in rows]}
    hf = datasets.Dataset.from_dict(table, features=features).to_iterable_dataset(num_shards=4)
    stream = StreamingBuckets.from_hf(hf, RULE, 4, caption_column="text", buffer_size=20)
    context = QUICK if workers else None
    batches = list(DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context))
    assert sorted(i for batch in batches for i in numbers(batch)) == list(range(40))
    assert all(batch["caption"] == [f"caption {i}" for i in numbers(batch)] for batch in batches)


def test_an_iterator_that_has_ended_is_no_empty_epoch() -> None:
    stream = StreamingBuckets(iter(Stream(5)), RULE, 2)
    assert sum(len(batch["path"]) for batch in stream) == 5
    with pytest.raises(KohyaBucketError, match="an iterator that an earlier pass has read to its end"):
        list(stream)
    again = StreamingBuckets(lambda: iter(Stream(5)), RULE, 2)
    assert [sum(len(batch["path"]) for batch in again) for _ in range(2)] == [5, 5]


def test_arguments_of_streams() -> None:
    for options in ({"seed": None}, {"seed": 0.5}, {"num_replicas": 1.0, "rank": 0}, {"buffer_size": 1e3}):
        with pytest.raises(KohyaBucketError, match=f"{next(iter(options))} is"):
            StreamingBuckets(Stream(5), RULE, 2, **options)
    with pytest.raises(KohyaBucketError, match="rule is 'kohya'"):
        StreamingBuckets(Stream(5), "kohya", 2)
    assert len(list(StreamingBuckets(Stream(5), RULE, 5, seed=-1))) > 0


@pytest.mark.parametrize("stream", [5, None, {"image": []}])
def test_what_is_no_stream_is_refused(stream: Any) -> None:
    with pytest.raises(KohyaBucketError, match=f"stream is a {type(stream).__name__}, but must be an iterable"):
        StreamingBuckets(stream, RULE, 2)


@pytest.mark.parametrize(
    ("samples", "options", "message"),
    [
        (Stream(3), {"caption_column": "txt"}, "sample 0 has no 'txt', only image, text, key"),
        (Stream(3), {"name_column": "name"}, "sample 0 has no 'name'"),
        ([(b"", "a")], {}, "sample 0 is a tuple"),
        ([{"image": encoded((20, 20), 0), "text": ["a", "b"]}], {"caption_column": "text"}, r"caption is \['a', 'b'\]"),
        (Stream(3), {"transform": lambda _: None}, "None for stream:"),
    ],
)
def test_samples_that_do_not_fit_are_named(samples: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KohyaBucketError, match=message):
        list(StreamingBuckets(samples, RULE, 2, **options))


def test_splits_are_no_stream() -> None:
    with pytest.raises(KohyaBucketError, match="a dict of 'train', 'test', not one dataset"):
        StreamingBuckets.from_hf({"train": Stream(3), "test": Stream(3)}, RULE, 2)


def test_whole_batches_are_not_batched_again() -> None:
    with pytest.raises(KohyaBucketError, match=r"use DataLoader\(stream, batch_size=None\)"):
        list(DataLoader(StreamingBuckets(Stream(6), RULE, 2), batch_size=2))
    with pytest.raises(KohyaBucketError, match="transform is 3"):
        StreamingBuckets(Stream(6), RULE, 2, transform=3)


def test_a_folder_that_goes_away_ends_a_stream_of_paths(tmp_path: Path) -> None:
    paths = make_pictures(tmp_path / "a", [(16, 16)] * 6)

    def rows() -> Iterator[dict[str, Any]]:
        for n, path in enumerate(paths):
            if n == 4:
                (tmp_path / "a").rename(tmp_path / "elsewhere")
            yield {"image": str(path)}

    stream = StreamingBuckets(rows, RULE, 2)
    with pytest.raises(UnreadableError, match="a is gone, or empty"):
        list(stream)
