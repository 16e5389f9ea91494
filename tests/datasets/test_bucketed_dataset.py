"""`BucketedDataset`: what an item holds, and that a plain DataLoader can batch it."""

import errno
import logging
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from kohya_bucket import BucketBatchSampler, BucketedDataset, BucketSet, FixedBuckets, KohyaBuckets
from kohya_bucket.buckets import (
    Bucket,
    geometry,
)
from kohya_bucket.datasets import sources
from kohya_bucket.datasets.captions import caption_beside
from kohya_bucket.errors import KohyaBucketError, StorageError, UnreadableError
from kohya_bucket.images import MetadataCache
from kohya_bucket.images.pixels import load_pixels
from kohya_bucket.images.resize import resize_and_crop
from tests.pictures import make_pictures, spoil
from tests.warm import QUICK

SIZES = [(100, 60), (60, 100), (64, 64), (120, 50), (30, 30), (64, 128)]
SET = BucketSet.from_dims([(64, 64), (96, 64), (64, 96)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i, (width, height) in enumerate(SIZES):
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(where / f"{i}.png")
        (where / f"{i}.txt").write_text(f"caption {i}\n", encoding="utf-8")
    return where


@pytest.fixture
def paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png"))


@pytest.mark.parametrize(
    "rule", [FixedBuckets(SET), KohyaBuckets(64, 32, 128, 16), KohyaBuckets(64, reso_steps=16, no_upscale=True)]
)
def test_items_are_what_the_rule_and_the_pixels_say(paths: list[Path], rule: object) -> None:
    dataset = BucketedDataset(paths=paths, rule=rule, captions=[f"c{i}" for i in range(6)])
    placement = rule.place(SIZES)
    assert len(dataset) == 6
    assert (dataset.bucket_indices == placement.bucket_index).all()
    for i in range(6):
        item = dataset[i]
        bucket = placement.bucket(i)
        assert item["bucket"] == bucket
        assert item["image"].shape == (3, bucket.height, bucket.width)
        assert item["image"].dtype == torch.float32
        assert item["path"] == str(paths[i])
        assert item["caption"] == f"c{i}"
        assert item["original_size"].tolist() == list(SIZES[i])
        assert item["crop_ltrb"].tolist() == placement.crop_ltrb[i].astype(np.float32).tolist()
        expected = resize_and_crop(load_pixels(paths[i]), tuple(placement.resized_sizes[i]), bucket.as_tuple())
        back = ((item["image"] + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
        assert (back == expected).all()
        assert item["image"].min() >= -1
        assert item["image"].max() <= 1


def test_a_plain_loader_batches_it_with_the_default_collate(paths: list[Path]) -> None:
    dataset = BucketedDataset(paths, FixedBuckets(BucketSet.from_dims([(64, 64)])), captions=list("abcdef"))
    batch = next(iter(DataLoader(dataset, batch_sampler=[[0, 2, 5, 1]])))
    assert batch["image"].shape == (4, 3, 64, 64)
    assert batch["bucket"] == [Bucket(64, 64)] * 4
    assert batch["caption"] == ["a", "c", "f", "b"]
    assert batch["path"] == [str(paths[i]) for i in (0, 2, 5, 1)]
    assert batch["original_size"].tolist() == [list(SIZES[i]) for i in (0, 2, 5, 1)]
    assert batch["crop_ltrb"].shape == (4, 4)


@pytest.mark.slow
def test_spawned_workers_can_batch_it(paths: list[Path]) -> None:
    dataset = BucketedDataset(paths, FixedBuckets(BucketSet.from_dims([(64, 64)])))
    loader = DataLoader(dataset, batch_sampler=[[0, 1], [2, 3]], num_workers=1, multiprocessing_context=QUICK)
    batches = list(loader)
    assert [len(b["bucket"]) for b in batches] == [2, 2]
    assert torch.equal(batches[1]["image"][0], dataset[2]["image"])


def test_transform_sees_the_finished_tensor(paths: list[Path]) -> None:
    plain = BucketedDataset(paths, FixedBuckets(SET))
    flipped = BucketedDataset(paths, FixedBuckets(SET), transform=lambda x: x.flip(-1))
    assert torch.equal(flipped[0]["image"], plain[0]["image"].flip(-1))


def test_captions_beside_the_images(
    folder: Path, paths: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = BucketedDataset.from_folder(folder, FixedBuckets(SET))
    assert [dataset[i]["caption"] for i in range(6)] == [f"caption {i}" for i in range(6)]
    assert not caplog.messages
    BucketedDataset.from_folder(folder, FixedBuckets(SET), captions=".caption")
    assert "6 of 6 images have no .caption file, so an empty one is trained" in caplog.text
    assert len(caplog.messages) == 1
    BucketedDataset(paths, FixedBuckets(SET), captions=["a", "", "c", " ", "e", "f"])
    assert f"2 of 6 images have no caption, so an empty one is trained ({paths[1]}, {paths[3]})" in caplog.messages[1]
    (tmp_path / "list.txt").write_text(f"{paths[0]}\n{tmp_path / 'gone' / 'x.png'}\n", encoding="utf-8")
    listed = BucketedDataset.from_folder(tmp_path / "list.txt", FixedBuckets(SET))
    assert [index >= 0 for index in listed.bucket_indices] == [True, False]  # a folder that is gone ends nothing
    assert BucketedDataset(paths, FixedBuckets(SET), captions=".absent")[0]["caption"] == ""
    assert BucketedDataset(paths, FixedBuckets(SET))[0]["caption"] == ""
    with pytest.raises(KohyaBucketError, match="no images found"):
        BucketedDataset.from_folder(tmp_path, FixedBuckets(SET))


def test_images_without_a_bucket_are_named_and_never_drawn(
    paths: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no")
    Image.new("RGB", (5, 500)).save(tmp_path / "thin.png")
    listed = [paths[0], tmp_path / "broken.png", tmp_path / "thin.png"]
    with caplog.at_level(logging.WARNING):
        dataset = BucketedDataset(listed, KohyaBuckets(64, reso_steps=16, no_upscale=True))
    assert dataset.bucket_indices.tolist() == [0, -1, -1]
    assert [(i, Path(name).name) for i, name, _ in dataset.failures] == [(1, "broken.png"), (2, "thin.png")]
    assert "2 of 3 images" in caplog.text
    assert "not an image" in caplog.text
    with pytest.raises(KohyaBucketError, match=r"broken\.png"):
        dataset[1]
    with pytest.raises(KohyaBucketError, match=r"thin\.png"):
        dataset[2]


def test_mistakes_are_named(paths: list[Path], tmp_path: Path) -> None:
    rule = FixedBuckets(SET)
    with pytest.raises(KohyaBucketError, match="at least one image"):
        BucketedDataset([], rule)
    with pytest.raises(KohyaBucketError, match="2 captions for 6 images"):
        BucketedDataset(paths, rule, captions=["a", "b"])
    for one_text in ("a cat", "", ".", "./captions.txt", "..\\captions.txt"):
        with pytest.raises(KohyaBucketError, match="is one text"):
            BucketedDataset(paths, rule, captions=one_text)
    with pytest.raises(KohyaBucketError, match="'fancy'"):
        BucketedDataset(paths, rule, interpolation="fancy")
    with pytest.raises(KohyaBucketError, match=r"none of 1 images has a bucket.*no such file"):
        BucketedDataset([tmp_path / "absent.png"], rule)
    with pytest.raises(IndexError):
        BucketedDataset(paths, rule)[6]


def test_the_cache_spares_the_headers(tmp_path: Path) -> None:
    paths = make_pictures(tmp_path, SIZES)
    cache = MetadataCache.build(paths)
    for path in paths:
        spoil(path)
    dataset = BucketedDataset(paths, FixedBuckets(SET), metadata_cache=cache)
    assert (dataset.sizes == SIZES).all()


def test_an_image_of_another_size_than_its_bucket_was_chosen_for_is_not_cut_to_it(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jpg", tmp_path / "b.jpg"]
    for path in paths:
        Image.new("RGB", (96, 64)).save(path)
    dataset = BucketedDataset(paths, FixedBuckets(SET))
    Image.new("RGB", (64, 96), (255, 0, 0)).save(paths[0])
    item = dataset[0]
    assert (item["path"], item["image"].shape) == (str(paths[1]), (3, 64, 96))
    assert dataset.left_out.tolist() == [1, 0]
    why = "64x96 pixels, but 96x64 when its bucket was chosen.*run again"
    with pytest.raises(KohyaBucketError, match=why):
        BucketedDataset._pixels(dataset, 0)


def test_exif_is_obeyed_only_when_asked(tmp_path: Path) -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    Image.new("RGB", (96, 64)).save(tmp_path / "a.jpg", exif=tags)
    stored = BucketedDataset([tmp_path / "a.jpg"], FixedBuckets(SET))
    upright = BucketedDataset([tmp_path / "a.jpg"], FixedBuckets(SET), obey_exif=True)
    assert stored[0]["bucket"] == Bucket(96, 64)
    assert upright[0]["bucket"] == Bucket(64, 96)
    assert upright.sizes.tolist() == [[64, 96]]


@pytest.mark.parametrize("interpolation", ["area", "lanczos", "bilinear", "bicubic", "nearest", "box"])
def test_interpolation_is_selectable(paths: list[Path], interpolation: str) -> None:
    item = BucketedDataset(paths, FixedBuckets(SET), interpolation=interpolation)[0]
    size = geometry.cover_resize(*(np.array([v], float) for v in (100, 60, 100 / 60, 96, 64, 96 / 64)))
    expected = resize_and_crop(load_pixels(paths[0]), (int(size[0][0]), int(size[1][0])), (96, 64), interpolation)
    back = ((item["image"] + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy()
    assert (back == expected).all()


def test_a_data_set_is_columns_not_objects(paths: list[Path]) -> None:
    """What a dataset holds per image are rows of arrays: no list, dict or object grows with the images."""
    many = [str(path) for path in paths] * 400
    dataset = BucketedDataset(many, FixedBuckets(SET), captions=["a caption of some words"] * len(many))
    per_image = len(pickle.dumps(dataset)) / len(many)
    assert per_image < 140 + len(many[0])
    for value in [*vars(dataset).values(), *vars(dataset.source).values()]:
        assert not (isinstance(value, (list, dict, tuple, set)) and len(value) > 10)


@pytest.mark.parametrize("remainder", ["merge", "catch_all", "pad", "keep"])
def test_every_batch_of_the_sampler_has_one_shape_whatever_the_remainder(paths: list[Path], remainder: str) -> None:
    dataset = BucketedDataset(paths, FixedBuckets(SET))
    options = (
        {"base_bucket": 0} if remainder == "catch_all" else {"merge_max_crop": 0.99} if remainder == "merge" else {}
    )
    sampler = BucketBatchSampler(dataset, batch_size=4, remainder=remainder, **options)
    seen = []
    for batch in DataLoader(dataset, batch_sampler=sampler):
        bucket = batch["bucket"][0]
        assert batch["bucket"] == [bucket] * len(batch["path"])
        assert batch["image"].shape == (len(batch["path"]), 3, bucket.height, bucket.width)
        seen += batch["path"]
    assert set(seen) == {str(path) for path in paths}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"paths": "photo.png"}, r"'photo\.png'"),
        ({"paths": Path("photo.png")}, "'photo.png'"),
        ({"rule": KohyaBuckets}, r"rule is the class KohyaBuckets, but must be a rule, e\.g\. KohyaBuckets"),
        ({"rule": SET}, r"rule is BucketSet.*FixedBuckets\(bucket_set\)"),
        ({"rule": "kohya"}, "rule is 'kohya'"),
        ({"captions": [None]}, "caption 0 is None, but must be a text"),
        ({"captions": ["\ud83d"]}, "caption 0 is .*, but must be whole characters"),
        ({"metadata_cache": "x.parquet"}, r"metadata_cache is 'x\.parquet': give MetadataCache\.load"),
    ],
)
def test_arguments_of_the_wrong_kind(folder: Path, arguments: dict, message: str) -> None:
    with pytest.raises(KohyaBucketError, match=message):
        BucketedDataset(**{"paths": [folder / "0.png"], "rule": KohyaBuckets(64, 32, 128, 32), **arguments})


def test_an_index_is_a_whole_number(folder: Path) -> None:
    dataset = BucketedDataset([folder / "0.png", folder / "1.png"], FixedBuckets(SET))
    assert dataset[np.int64(1)]["path"] == dataset[-1]["path"] == str(folder / "1.png")
    for index in (0.9, "0", slice(0, 1)):
        with pytest.raises(TypeError):
            dataset[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"captions": {"0.png": "a"}}, r"captions is a mapping.*give a list in the order of the paths"),
        ({"transform": "flip"}, "transform is 'flip', but must be a function"),
        ({"paths": ["0.png", None]}, "path 1 is None, but must be a text or a Path"),
        ({"paths": [float("nan")]}, "path 0 is nan"),
    ],
)
def test_tables_with_holes_and_mappings_are_refused(folder: Path, arguments: dict, message: str) -> None:
    with pytest.raises(KohyaBucketError, match=message):
        BucketedDataset(**{"paths": [folder / "0.png"], "rule": FixedBuckets(SET), **arguments})


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_loader_without_the_sampler_says_what_is_missing(paths: list[Path], workers: int) -> None:
    loader = DataLoader(BucketedDataset(paths, FixedBuckets(SET)), batch_size=4, num_workers=workers)
    with pytest.raises(
        KohyaBucketError, match=r"0\.png of bucket 96x64 and .*1\.png of bucket 64x96.*BucketBatchSampler"
    ):
        list(loader)


def test_what_a_transform_returns_must_fit_its_batch(paths: list[Path]) -> None:
    same = [paths[0]] * 3
    loader = DataLoader(BucketedDataset(same, FixedBuckets(SET), transform=lambda _: None), batch_size=3)
    with pytest.raises(KohyaBucketError, match=r"None for .*0\.png"):
        list(loader)
    widths = iter((96, 96, 95))
    uneven = BucketedDataset(same, FixedBuckets(SET), transform=lambda image: image[:, :, : next(widths)])
    with pytest.raises(KohyaBucketError, match=r"shape \[3, 64, 96\] for .* and \[3, 64, 95\] for .*bucket 96x64"):
        list(DataLoader(uneven, batch_size=3))
    # Images of different buckets that a transform makes equal do fit.
    dataset = BucketedDataset(paths, FixedBuckets(SET), transform=lambda image: image[:, :32, :32])
    (batch,) = DataLoader(dataset, batch_size=6)
    assert batch["image"].shape == (6, 3, 32, 32)


def test_captions_in_json_files(tmp_path: Path) -> None:
    for i, content in enumerate(['{"caption": " a cat ", "seed": 1}', '"a dog"', '{"prompt": "x"}', "{", "[1]"]):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.json").write_text(content, encoding="utf-8")
    dataset = BucketedDataset.from_folder(tmp_path, FixedBuckets(SET), captions=".json")
    assert [dataset[i]["caption"] for i in (0, 1)] == ["a cat", "a dog"]
    for i, message in ((2, 'under the key "caption".*holds the keys prompt'), (3, "must be JSON"), (4, "holds list")):
        with pytest.raises(KohyaBucketError, match=rf"{i}\.json: .*{message}"):
            dataset[i]


class Given:
    """A source of two images, as someone may write it."""

    def __init__(self, pixels: object, sizes: object = ((80, 80), (90, 60))) -> None:
        self.given, self.sizes = pixels, np.array(sizes, dtype=np.int32)

    def __len__(self) -> int:
        return 2

    def read_sizes(self) -> tuple[object, list[tuple[int, str, str]]]:
        return self.sizes, []

    def pixels(self, index: int) -> object:
        return self.given

    def caption(self, index: int) -> str:
        return ""

    def name(self, index: int) -> str:
        return f"given:{index}"


def test_a_source_that_is_none_is_refused() -> None:
    assert (
        BucketedDataset.from_source(Given(np.zeros((80, 80, 3), np.uint8)), FixedBuckets(SET))[0]["path"] == "given:0"
    )
    with pytest.raises(KohyaBucketError, match="source is a list without read_sizes, pixels, caption, name"):
        BucketedDataset.from_source([1], FixedBuckets(SET))
    with pytest.raises(KohyaBucketError, match=r"sizes of shape \[1, 2\] for 2 images"):
        BucketedDataset.from_source(Given(None, [(80, 80)]), FixedBuckets(SET))


@pytest.mark.parametrize("pixels", [np.ones((80, 80, 3), np.float32), np.zeros((80, 80), np.uint8)])
def test_pixels_of_another_kind_are_refused(pixels: np.ndarray) -> None:
    """Floats from 0 to 1 were trained as if they were black."""
    dataset = BucketedDataset.from_source(Given(pixels), FixedBuckets(SET))
    with pytest.raises(KohyaBucketError, match=r"pixels of given:0 are .* must be uint8 \[H, W, 3\]"):
        dataset[0]


def cut_off(path: Path) -> None:
    """A sound header, and half of the pixels."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def with_one_cut_off(tmp_path: Path) -> list[Path]:
    noise = np.random.default_rng(0).integers(0, 256, (9, 64, 64, 3), dtype=np.uint8)
    paths = [tmp_path / f"{i}.png" for i in range(len(noise))]
    for path, pixels in zip(paths, noise, strict=True):
        Image.fromarray(pixels).save(path)
    cut_off(paths[4])
    return paths


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.weekly)])
def test_an_image_that_cannot_be_read_is_left_out_and_another_of_its_bucket_trains(
    with_one_cut_off: list[Path], workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = BucketedDataset(with_one_cut_off, FixedBuckets(SET))
    sampler = BucketBatchSampler(dataset, 3)
    loader = DataLoader(
        dataset, batch_sampler=sampler, num_workers=workers, multiprocessing_context=QUICK if workers else None
    )
    batches = [[Path(path).name for path in batch["path"]] for batch in loader]
    assert [len(set(batch)) for batch in batches] == [3, 3, 3]
    seen = [name for batch in batches for name in batch]
    assert set(seen) == {f"{i}.png" for i in range(9) if i != 4}
    assert dataset.left_out.tolist() == [0, 0, 0, 0, 1, 0, 0, 0, 0]
    if not workers:
        assert "4.png" in caplog.text
        assert "trains in its place" in caplog.text


def test_where_it_is_asked_or_nothing_can_stand_for_it_a_bad_image_is_an_error(with_one_cut_off: list[Path]) -> None:
    stopping = BucketedDataset(with_one_cut_off, FixedBuckets(SET), on_bad_image="stop")
    with pytest.raises(KohyaBucketError, match=r"4\.png"):
        stopping[4]
    alone = BucketedDataset(with_one_cut_off[4:5], FixedBuckets(SET))
    with pytest.raises(KohyaBucketError, match=r"4\.png.*; no other image of its bucket"):
        alone[0]
    with pytest.raises(KohyaBucketError, match="on_bad_image is 'skip'"):
        BucketedDataset(with_one_cut_off, FixedBuckets(SET), on_bad_image="skip")


def test_the_caption_of_an_address_without_an_ending_is_beside_it():
    memory = pytest.importorskip("fsspec", reason="fsspec is not installed").filesystem("memory")
    for name in ("captions/a", "b.c/a"):
        memory.pipe(f"/{name}.txt", b"a cat")
        assert caption_beside(f"memory://{name}", ".txt") == "a cat"


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("emptied", [False, True])
def test_a_folder_that_goes_away_ends_the_epoch_which_goes_on_once_it_is_back(
    tmp_path: Path, workers: int, emptied: bool
) -> None:
    """As a drive or a share does, or what is mounted on a folder that stays."""
    for part in "ab":
        make_pictures(tmp_path / part, [(64, 64)] * 20)
    dataset = BucketedDataset.from_folder(tmp_path, FixedBuckets(SET), captions=None)
    sampler = BucketBatchSampler(dataset, 2, seed=1)
    seen: list[str] = []
    states = []

    def train() -> None:
        for batch in DataLoader(dataset, batch_sampler=sampler, num_workers=workers, prefetch_factor=workers or None):
            if not states:
                (tmp_path / "b").rename(tmp_path / "elsewhere")
                if emptied:
                    (tmp_path / "b").mkdir()
            seen.extend(batch["path"])
            states.append(sampler.state_dict())

    with pytest.raises(UnreadableError, match=r"b is gone, or empty: .*; bring back its drive, share or files"):
        train()
    assert dataset.left_out.sum() == 0
    if emptied:
        (tmp_path / "b").rmdir()
    (tmp_path / "elsewhere").rename(tmp_path / "b")
    if not workers:  # whose state counts batches that are loaded ahead
        sampler.load_state_dict(states[-1])
        for batch in DataLoader(dataset, batch_sampler=sampler):
            seen += batch["path"]
        assert sorted(seen) == sorted(dataset.source.name(i) for i in range(40))


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE], ids=errno.errorcode.get)
def test_a_fault_of_the_disk_that_may_pass_is_no_broken_image(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(path: str, **_: object) -> object:
        raise OSError(code, os.strerror(code), path)

    dataset = BucketedDataset(paths, FixedBuckets(SET))
    monkeypatch.setattr(sources, "load_pixels", fail)
    with pytest.raises(UnreadableError, match=r"0\.png: cannot be read now .*run again"):
        dataset[0]
    assert dataset.left_out.sum() == 0


def test_a_file_that_is_gone_alone_or_may_not_be_read_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = make_pictures(tmp_path / "a", [(64, 64)] * 4)
    dataset = BucketedDataset(paths, FixedBuckets(SET))
    Path(paths[1]).unlink()
    assert dataset[1]["path"] != str(paths[1])
    load = sources.load_pixels

    def refused(path: str, **more: bool) -> object:
        if path == str(paths[2]):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return load(path, **more)

    monkeypatch.setattr(sources, "load_pixels", refused)
    assert dataset[2]["path"] in {str(paths[0]), str(paths[3])}
    assert dataset.left_out.tolist() == [0, 1, 1, 0]


def test_storage_that_does_not_answer_is_no_broken_image(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> object:
        raise StorageError("s3 is away")

    monkeypatch.setattr(sources, "fetched", fail)
    with pytest.raises(StorageError, match="s3 is away"):
        sources.cell_pixels("s3://bucket/a.png", False)


def test_what_all_ranks_see_is_said_by_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make_pictures(tmp_path, [(64, 64)] * 3)
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        caplog.clear()
        BucketedDataset.from_folder(tmp_path, FixedBuckets(SET))
        assert caplog.text.count("3 of 3 images have no .txt file") == lines
