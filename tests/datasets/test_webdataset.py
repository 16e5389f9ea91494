"""Tar shards: the samples that the webdataset package itself finds, with sizes from one pass."""

import gzip
import io
import os
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

wds = pytest.importorskip("webdataset")

from PIL import Image  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from kohya_bucket import BucketSet, FixedBuckets  # noqa: E402
from kohya_bucket.datasets.webdataset import dataset_from_shards, expand_shards, stream_from_shards  # noqa: E402
from kohya_bucket.errors import KohyaBucketError  # noqa: E402
from kohya_bucket.images import tar_index  # noqa: E402
from kohya_bucket.images.tar_index import TarIndex, split_key  # noqa: E402
from tests.warm import QUICK  # noqa: E402

pytestmark = pytest.mark.further

RULE = FixedBuckets(BucketSet.from_dims([(64, 64), (96, 64), (64, 96)]))


def encoded(number: int, kind: str) -> bytes:
    rng = np.random.default_rng(number)
    size = (60 + number, 90, 3) if number % 2 else (70, 60 + number, 3)
    out = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, size, dtype=np.uint8)).save(out, kind)
    return out.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    paths = []
    for s in range(3):
        path = tmp_path / f"data-{s:06d}.tar"
        with tarfile.open(path, "w") as tar:
            for k in range(5):
                number = 5 * s + k
                key = f"part{s}/{number:05d}"
                if number % 3 != 1:
                    add(tar, f"{key}.txt", f" caption {number} é\n".encode())
                add(
                    tar,
                    f"{key}.{('png', 'jpg', 'webp')[number % 3]}",
                    encoded(number, ("PNG", "JPEG", "WEBP")[number % 3]),
                )
                add(tar, f"{key}.json", b"{}")
            add(tar, f"part{s}/notes.md", b"no image")
        paths.append(str(path))
    return paths


def found_by_webdataset(shards: list[str]) -> list[tuple[str, bytes, str]]:
    out = []
    for sample in wds.WebDataset(shards, shardshuffle=False):
        image = next((sample[e] for e in ("png", "jpg", "webp") if e in sample), None)
        if image is not None:
            out.append((sample["__key__"], image, sample.get("txt", b"").decode().strip()))
    return out


@pytest.mark.parametrize("wrong", [{"decode": "quick"}, {"interpolation": "best"}, {"on_bad_images": "stop"}])
def test_wrong_settings_are_refused_before_a_shard_is_read(tmp_path, wrong):
    broken = tmp_path / "a.tar"
    broken.write_bytes(b"no tar at all")
    with pytest.raises((KohyaBucketError, TypeError), match=next(iter(wrong))):
        dataset_from_shards(str(broken), RULE, index=tmp_path / "index.parquet", **wrong)


def test_samples_are_those_that_webdataset_finds(shards: list[str]) -> None:
    dataset = dataset_from_shards(shards, RULE)
    expected = found_by_webdataset(shards)
    assert len(dataset) == len(expected) == 15
    for i, (key, image, caption) in enumerate(expected):
        item = dataset[i]
        assert item["path"] == f"{shards[i // 5]}#{key}"
        assert item["caption"] == caption
        with Image.open(io.BytesIO(image)) as opened:
            assert item["original_size"].tolist() == list(opened.size)
            assert (dataset.source.pixels(i) == np.asarray(opened.convert("RGB"))).all()


def test_webdatasets_notation_and_a_plain_loader(shards: list[str]) -> None:
    pattern = shards[0].replace("000000", "{000000..000002}")
    dataset = dataset_from_shards(pattern, RULE)
    assert len(dataset) == 15
    same = np.flatnonzero(dataset.bucket_indices == dataset.bucket_indices[0])[:2].tolist()
    batch = next(iter(DataLoader(dataset, batch_sampler=[same])))
    assert len(batch["bucket"]) == 2


def test_the_index_is_kept_and_only_changed_shards_are_read_again(
    shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index.parquet"
    first = dataset_from_shards(shards, RULE, index=index)
    opened: list[str] = []
    real = tar_index._opened

    def counted(shard: str) -> Any:
        opened.append(Path(shard).name)
        return real(shard)

    monkeypatch.setattr(tar_index, "_opened", counted)
    again = dataset_from_shards(shards, RULE, index=index)
    assert opened == []
    assert (again.source.index.rows == first.source.index.rows).all()
    assert list(again.source.index.keys) == list(first.source.index.keys)

    with tarfile.open(shards[1], "a") as tar:
        add(tar, "part1/new.png", encoded(77, "PNG"))
    os.utime(shards[1], ns=(0, time.time_ns() + 10**10))  # a file system may count in whole seconds
    grown = dataset_from_shards(shards, RULE, index=index)
    assert opened == ["data-000001.tar"]
    assert len(grown) == 16
    assert grown[15]["caption"] == dataset_from_shards(shards, RULE)[15]["caption"]
    with pytest.raises(KohyaBucketError, match="has changed or gone"):
        type(first.source)(first.source.index)
    opened.clear()
    dataset_from_shards(shards, RULE, index=index, caption=None)
    assert len(opened) == 3


def test_only_headers_are_read_for_the_index(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(Image, "open", refuse)
    assert (TarIndex.build(shards).rows["width"] > 0).all()


def test_a_broken_image_is_named_and_a_broken_shard_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "good.png", encoded(1, "PNG"))
        add(tar, "bad.png", b"broken")
        add(tar, "empty.png", b"")
    dataset = dataset_from_shards([path], RULE)
    assert [(Path(name).name, reason[:12]) for _, name, reason in dataset.failures] == [
        ("a.tar#bad.png".removesuffix(".png"), "not an image"),
        ("a.tar#empty", "an empty fil"),
    ]
    (tmp_path / "b.tar").write_bytes(b"no tar at all" * 100)
    with pytest.raises(KohyaBucketError, match=r"b\.tar"):
        dataset_from_shards([tmp_path / "b.tar"], RULE)
    with pytest.raises(KohyaBucketError, match=r"c\.tar"):
        dataset_from_shards([tmp_path / "c.tar"], RULE)
    with pytest.raises(KohyaBucketError, match="use stream_from_shards"):
        dataset_from_shards(["https://example.org/a.tar"], RULE)
    (tmp_path / "i.parquet").write_bytes(b"no")
    with pytest.raises(KohyaBucketError, match="cannot be read as an index"):
        dataset_from_shards([path], RULE, index=tmp_path / "i.parquet")


def test_paths_of_windows(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Path(shards[0]).parent.joinpath("c:", "data 50%").mkdir(parents=True)
    monkeypatch.chdir(Path(shards[0]).parent)
    named = [shutil.copy(shard, f"c:/data 50%/a{i}.tar") for i, shard in enumerate(shards)]
    monkeypatch.setattr(os, "sep", "\\")
    given = "c:\\data 50%\\a{0..2}.tar"
    assert expand_shards(given) == named
    assert sum(len(batch["path"]) for batch in stream_from_shards(given, RULE, 4, buffer_size=12)) == 15
    for wrong, why in (("a{0..2.tar", "Unbalanced"), ("${WDS_OF_NOBODY}/a.tar", "missing environment variable")):
        with pytest.raises(KohyaBucketError, match=why):
            expand_shards(wrong)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_stream_gives_every_sample_once(shards: list[str], workers: int) -> None:
    stream = stream_from_shards(shards, RULE, 4, buffer_size=12)
    context = QUICK if workers else None
    batches = list(DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context))
    captions = {
        path.rpartition("#")[2]: caption
        for batch in batches
        for path, caption in zip(batch["path"], batch["caption"], strict=True)
    }
    assert captions == {key: caption for key, _, caption in found_by_webdataset(shards)}
    assert sum(len(batch["path"]) for batch in batches) == 15


@pytest.mark.parametrize("name", ["a/b.c/d.seg.png", "x.jpg", "noending", ".hidden", "A/B.JPG"])
def test_names_are_split_as_webdataset_splits_them(name: str) -> None:
    key, ending = wds.tariterators.base_plus_ext(name)
    assert split_key(name) == ((key, ending.lower()) if key else ("", ""))


def tar_of(path: Path, *members: tuple[str, bytes]) -> str:
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            add(tar, name, data)
    return str(path)


def both_ways(shard: str, **options: Any) -> list[dict[str, str]]:
    """Captions by key: at random, and as a stream."""
    dataset = dataset_from_shards(shard, RULE, **options)
    items = [dataset[i] for i in range(len(dataset))]
    stream = list(stream_from_shards(shard, RULE, 1, **options))
    return [
        {item["path"].rpartition("#")[2]: item["caption"] for item in items},
        {batch["path"][0].rpartition("#")[2]: batch["caption"][0] for batch in stream},
    ]


def test_captions_by_any_spelling_of_their_ending(shards: list[str], caplog: pytest.LogCaptureFixture) -> None:
    for ending in (".txt", "TXT"):
        captions, streamed = both_ways(shards[0], caption=ending)
        assert captions == streamed == {key: caption for key, _, caption in found_by_webdataset(shards[:1])}
    bare = [key for key, _, caption in found_by_webdataset(shards[:1]) if not caption]
    share = f"{len(bare)} of 5 images have no"
    assert len(bare) > 1
    assert "no captions:" not in caplog.text
    assert caplog.text.count(f"{share} .txt member, so an empty one is trained") == 2
    assert caplog.text.count(f"{share} caption, so an empty one is trained") == 2
    for captions in both_ways(shards[0], caption="text"):
        assert set(captions.values()) == {""}
    assert caplog.text.count("no captions: no member ends in .text, only in .jpg, .json, .md") == 2


def test_keys_end_at_the_first_dot_and_captions_follow_their_images(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    members = [("a.png", encoded(1, "PNG")), ("a.txt", b"a cat"), ("b.v2.png", encoded(2, "PNG")), ("b.v2.txt", b"dog")]
    shard = tar_of(tmp_path / "a.tar", *members)
    assert both_ways(shard) == [{"a": "a cat", "b": "dog"}] * 2
    assert not caplog.messages
    other = tar_of(tmp_path / "b.tar", *members[:3], ("b.v3.txt", b"dog"))
    assert both_ways(other) == [{"a": "a cat", "b": ""}] * 2
    said = [message for message in caplog.messages if "1 of 2 images has no" in message]
    assert len(said) == 2
    assert all("b.tar#b)" in message for message in said)
    caplog.clear()
    assert both_ways(other, caption=None) == [{"a": "", "b": ""}] * 2
    assert not caplog.messages


def test_captions_in_json_members(tmp_path: Path) -> None:
    image = encoded(1, "PNG")
    shard = tar_of(tmp_path / "a.tar", ("a.png", image), ("a.json", b'{"caption": "a cat", "id": 3}'))
    assert both_ways(shard, caption="json") == [{"a": "a cat"}] * 2
    bad = tar_of(tmp_path / "b.tar", ("b.png", image), ("b.json", b'{"id": 3}'))
    for read in (lambda: dataset_from_shards(bad, RULE, caption="json")[0], lambda: both_ways(bad, caption="json")):
        with pytest.raises(KohyaBucketError, match=r"b\.tar#b\.json: .*holds the keys id"):
            read()
    latin = tar_of(tmp_path / "c.tar", ("c.png", image), ("c.txt", b"caf\xe9"))
    for read in (lambda: dataset_from_shards(latin, RULE)[0], lambda: list(stream_from_shards(latin, RULE, 1))):
        with pytest.raises(KohyaBucketError, match=r"c\.tar#c\.txt: .* UTF-8"):
            read()


def test_which_of_several_images_is_meant(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    image, mask = encoded(1, "JPEG"), encoded(4, "PNG")
    shard = tar_of(tmp_path / "a.tar", ("a.mask.png", mask), ("a.jpg", image), ("a.txt", b"a"))
    index = tmp_path / "index.parquet"
    for options, size in (({}, [64, 70]), ({"image": ".jpg"}, [90, 61]), ({"image": "mask.png"}, [64, 70])):
        caplog.clear()
        assert dataset_from_shards(shard, RULE, index=index, **options)[0]["original_size"].tolist() == size
        (batch,) = stream_from_shards(shard, RULE, 1, **options)
        assert batch["original_size"][0].tolist() == size
        warned = caplog.text.count(
            "several images in 1 of the samples, of which the first is used: a (mask.png, jpg, txt)"
        )
        assert warned == (0 if options else 2)


def test_samples_without_an_image_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in a shard in which all images come first: webdataset takes neighbours for one sample."""
    images = [(f"{key}.png", encoded(number, "PNG")) for number, key in enumerate("ab")]
    shard = tar_of(tmp_path / "a.tar", *images, ("a.txt", b"1"), ("b.txt", b"2"))
    assert both_ways(shard) == [{"a": "", "b": ""}] * 2
    said = (
        "no image in 2 of the samples, which are left out: a (txt), b (txt); the members of a sample must follow "
        "each other"
    )
    assert caplog.text.count(said) == 2
    assert f"{shard}#a has no bucket" in caplog.text


def test_damaged_and_compressed_shards(shards: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = Path(shards[0]).read_bytes()
    cut = tmp_path / "cut.tar"
    cut.write_bytes(whole[: len(whole) // 2])
    twice = tar_of(tmp_path / "twice.tar", ("a.png", encoded(1, "PNG")), ("a.png", encoded(3, "PNG")))
    for shard, message in (
        (cut, r"cut\.tar: cannot be read as a tar file \(unexpected end"),
        (twice, "twice.tar: .*a.png"),
    ):
        with pytest.raises(KohyaBucketError, match=message):
            dataset_from_shards(shard, RULE)
        with pytest.raises(KohyaBucketError, match=message):
            list(stream_from_shards(shard, RULE, 1))
    with pytest.raises(KohyaBucketError, match=r"gone\.tar: cannot be read as a tar file \(No such file"):
        list(stream_from_shards(tmp_path / "gone.tar", RULE, 1))
    for make in (dataset_from_shards, lambda none, rule: stream_from_shards(none, rule, 1)):
        with pytest.raises(KohyaBucketError, match="no shards"):
            make([], RULE)

    packed = tmp_path / "data.tar.gz"
    packed.write_bytes(gzip.compress(whole))
    with pytest.raises(KohyaBucketError, match=r"compressed with gzip.*unpack it.*stream_from_shards"):
        dataset_from_shards(packed, RULE)
    assert sum(len(batch["path"]) for batch in stream_from_shards(packed, RULE, 2)) == 5

    caplog.clear()
    with tarfile.open(shards[0]) as tar:
        member = tar.getmembers()[4]
    cut.write_bytes(whole[: member.offset])
    assert len(dataset_from_shards(cut, RULE)) < 5
    assert "cut.tar: has no end mark: it may be truncated" in caplog.text
    caplog.clear()
    dataset_from_shards(shards, RULE)
    assert "cut off" not in caplog.text


def test_a_shard_that_changes_while_it_is_used_is_noticed(shards: list[str]) -> None:
    dataset = dataset_from_shards(shards, RULE)
    assert dataset[6]["path"].startswith(shards[1])
    os.utime(shards[1], ns=(1, 1))
    with pytest.raises(KohyaBucketError, match=r"000001\.tar: changed"):
        dataset[6]
    assert dataset[0]["path"].startswith(shards[0])
