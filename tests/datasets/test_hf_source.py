"""Hugging Face datasets of every kind of image column."""

import io
from typing import Any

import numpy as np
import pytest
import torch

datasets = pytest.importorskip("datasets")

from PIL import Image  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from kohya_bucket import BucketedDataset, BucketSet, FixedBuckets  # noqa: E402
from kohya_bucket.buckets import Bucket  # noqa: E402
from kohya_bucket.datasets.sources import cell_pixels, cell_size  # noqa: E402
from kohya_bucket.errors import KohyaBucketError  # noqa: E402
from kohya_bucket.images.formats import UnreadableImageError  # noqa: E402
from tests.pictures import make_pictures  # noqa: E402

pytestmark = pytest.mark.further

RULE = FixedBuckets(BucketSet.from_dims([(64, 64), (96, 64), (64, 96)]))
SIZES = [(90, 60), (60, 90), (64, 64), (30, 31)]
ARRAYS = [np.random.default_rng(i).integers(0, 256, (h, w, 3), dtype=np.uint8) for i, (w, h) in enumerate(SIZES)]
CAPTIONS = ["a", "b", None, "d"]


def png(array: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG", **options)
    return out.getvalue()


def encoded(decode: bool = True) -> Any:
    features = datasets.Features({"image": datasets.Image(decode=decode), "text": datasets.Value("string")})
    rows = {"image": [{"bytes": png(a), "path": None} for a in ARRAYS], "text": CAPTIONS}
    return datasets.Dataset.from_dict(rows, features=features)


def binary() -> Any:
    return datasets.Dataset.from_dict({"image": [png(a) for a in ARRAYS], "text": CAPTIONS})


def arrays(order: str) -> Any:
    turned = [a.transpose(2, 0, 1) if order == "CHW" else a for a in ARRAYS]
    return datasets.Dataset.from_dict({"image": turned, "text": CAPTIONS})


def transformed() -> Any:
    def as_float(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        images = (
            [torch.from_numpy(np.array(i)).permute(2, 0, 1).float() / 255 for i in rows["image"]]
            if "image" in rows
            else None
        )
        return {**rows, **({"image": images} if images else {})}

    return encoded().with_transform(as_float)


KINDS = {
    "decoded": encoded,
    "undecoded": lambda: encoded(decode=False),
    "bytes": binary,
    "lists HWC": lambda: arrays("HWC"),
    "lists CHW": lambda: arrays("CHW"),
    "numpy CHW": lambda: arrays("CHW").with_format("numpy"),
    "torch HWC": lambda: arrays("HWC").with_format("torch"),
    "decoded as torch": lambda: encoded().with_format("torch"),
    "own transform": transformed,
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_column_gives_the_same_items(kind: str) -> None:
    dataset = BucketedDataset.from_hf(KINDS[kind](), RULE, image_column="image", caption_column="text")
    plain = BucketedDataset.from_hf(encoded(), RULE)
    assert dataset.sizes.tolist() == [list(s) for s in SIZES]
    for i in range(4):
        item = dataset[i]
        assert torch.equal(item["image"], plain[i]["image"])
        assert item["caption"] == (CAPTIONS[i] or "")
        assert item["path"] == f"hf:{i}"
        assert (dataset.source.pixels(i) == ARRAYS[i]).all()


def test_nothing_is_decoded_to_learn_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("decoded")

    source = encoded()
    monkeypatch.setattr(Image.Image, "load", refuse)
    monkeypatch.setattr(Image, "open", refuse)
    assert BucketedDataset.from_hf(source, RULE).sizes.tolist() == [list(s) for s in SIZES]


def test_a_plain_loader_batches_it() -> None:
    dataset = BucketedDataset.from_hf(encoded(), RULE, caption_column="text")
    batch = next(iter(DataLoader(dataset, batch_sampler=[[2, 3]])))
    assert batch["bucket"] == [Bucket(64, 64)] * 2
    assert batch["caption"] == ["", "d"]


def test_exif_is_obeyed_as_datasets_does() -> None:
    tags = Image.Exif()
    tags[0x0112] = 6
    rows = {"image": [{"bytes": png(ARRAYS[0], exif=tags), "path": None}]}
    hf = datasets.Dataset.from_dict(rows, features=datasets.Features({"image": datasets.Image()}))
    assert hf[0]["image"].size == (60, 90)
    dataset = BucketedDataset.from_hf(hf, RULE)
    assert dataset.sizes.tolist() == [[60, 90]]
    assert (dataset.source.pixels(0) == np.asarray(hf[0]["image"])).all()
    assert BucketedDataset.from_hf(hf, RULE, obey_exif=False).sizes.tolist() == [[90, 60]]


def test_mistakes_and_broken_rows_are_named() -> None:
    with pytest.raises(KohyaBucketError, match="'picture' does not exist: this dataset has image, text"):
        BucketedDataset.from_hf(encoded(), RULE, image_column="picture")
    with pytest.raises(KohyaBucketError, match="StreamingBuckets"):
        BucketedDataset.from_hf(encoded().to_iterable_dataset(), RULE)
    hf = datasets.Dataset.from_dict({"image": [png(ARRAYS[0]), b"broken", b"", None]})
    dataset = BucketedDataset.from_hf(hf, RULE)
    assert dataset.bucket_indices.tolist()[1:] == [-1, -1, -1]
    assert [name for _, name, _ in dataset.failures] == ["hf:1", "hf:2", "hf:3"]
    assert "not an image" in dataset.failures[0][2]
    assert dataset.failures[2][2] == "an empty cell"


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (np.zeros((5, 6, 7)), "no axis of 1, 3 or 4"),
        (np.zeros((2, 3)).astype(complex), "dtype complex128"),
        (np.full((4, 5, 3), -0.5), r"must lie in \[0, 1\], found -0.5"),
        (np.full((4, 5, 3), 300), "must lie in 0 to 255"),
        ({"bytes": None, "path": None}, "neither bytes nor a path"),
        (np.zeros(7), "is not an image"),
    ],
)
def test_arrays_that_are_no_images_are_refused(cell: Any, message: str) -> None:
    with pytest.raises(UnreadableImageError, match=message):
        cell_pixels(cell, False)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        (np.full((4, 5), 7, np.uint8), 7),
        (np.full((1, 4, 5), 7, np.int64), 7),
        (np.full((4, 5, 4), 7, np.uint8), 7),
        (np.full((4, 5, 3), 1.0), 255),
        (np.full((4, 5, 3), 65535, np.uint16), 255),
        (np.ones((4, 5), bool), 255),
        (torch.full((3, 4, 5), 0.5), 128),
    ],
)
def test_arrays_of_many_kinds_become_rgb(cell: Any, expected: int) -> None:
    assert cell_size(cell, False) == (5, 4)
    pixels = cell_pixels(cell, False)
    assert pixels.shape == (4, 5, 3)
    assert pixels.dtype == np.uint8
    assert (pixels == expected).all()


def test_a_transform_of_the_datasets_own_may_need_every_column() -> None:
    """As the training scripts of diffusers set one: it reads columns that are not asked for."""

    def both(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"image": [i.convert("L") for i in rows["image"]], "text": [f"{t}!" for t in rows["text"]]}

    dataset = BucketedDataset.from_hf(encoded().with_transform(both), RULE, caption_column="text")
    assert dataset.sizes.tolist() == [list(size) for size in SIZES]
    assert dataset[1]["caption"] == "b!"
    assert (dataset.source.pixels(1)[..., 0] == np.asarray(Image.fromarray(ARRAYS[1]).convert("L"))).all()
    with pytest.raises(KohyaBucketError, match="has no 'image', only pixel_values"):
        BucketedDataset.from_hf(encoded().with_transform(lambda rows: {"pixel_values": rows["image"]}), RULE)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: datasets.DatasetDict(train=encoded(), test=encoded()), "a DatasetDict of 'train', 'test'.*choose one"),
        (lambda: encoded().select([]), "has no rows"),
        (lambda: [{"image": png(ARRAYS[0])}, {"img": png(ARRAYS[0])}], "hf:1 has no 'image', only img"),
        (lambda: [(png(ARRAYS[0]), "a")], "hf:0 is a tuple, but must be a mapping"),
    ],
)
def test_what_is_no_table_of_images_is_named(source: Any, message: str) -> None:
    with pytest.raises(KohyaBucketError, match=message):
        BucketedDataset.from_hf(source(), RULE)


@pytest.mark.parametrize("captions", [[["a", "b"]] * 4, [1, 2, 3, 4]])
def test_captions_that_are_no_text_are_refused(captions: list[Any]) -> None:
    hf = datasets.Dataset.from_dict({"image": [png(a) for a in ARRAYS], "text": captions})
    dataset = BucketedDataset.from_hf(hf, RULE, caption_column="text")
    with pytest.raises(KohyaBucketError, match=r"hf:1: its caption is .* but must be one text"):
        dataset[1]


def test_rows_are_told_apart_by_what_they_hold() -> None:
    """So that ranks, and saved positions, notice a table in another order; a transform may change rows each time."""

    def names(kind: str, order: list[int]) -> list[str]:
        return list(BucketedDataset.from_hf(KINDS[kind]().select(order), RULE).image_names)

    for kind in set(KINDS) - {"own transform"}:
        whole, turned = names(kind, [0, 1, 2, 3]), names(kind, [3, 1, 2, 0])
        assert len(set(whole)) == 4
        assert turned == [whole[i] for i in (3, 1, 2, 0)]
    assert names("own transform", [3, 1, 2, 0]) == [f"hf:{i}" for i in range(4)]


def test_rows_of_paths_are_told_apart_by_their_paths(tmp_path) -> None:
    paths = [str(path) for path in make_pictures(tmp_path / "images", SIZES)]
    table = datasets.Dataset.from_dict({"image": paths}).cast_column("image", datasets.Image())
    assert list(BucketedDataset.from_hf(table, RULE).image_names) == paths
    opened = [{"image": Image.open(path)} for path in paths]
    assert list(BucketedDataset.from_hf(opened, RULE).image_names) == paths
