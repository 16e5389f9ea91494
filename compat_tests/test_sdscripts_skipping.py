"""`skip_image_resolution` and metadata with the adapter in the real sd-scripts: what trains is what `plan` reads."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from compat_tests.sdscripts_support import build_groups, random_sizes, write_images, write_metadata
from kohya_bucket.trainers.sdscripts.config import Feature, ReadDataset, Release, read_config

BASE = {"resolution": 128, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 256}


@pytest.fixture
def skipping(patched: SimpleNamespace) -> SimpleNamespace:
    if Feature.SKIPPING not in Release.in_checkout(patched.root):
        pytest.skip("this sd-scripts does not know skip_image_resolution")
    return patched


def built(sd: SimpleNamespace, folder: Path, *subsets: dict[str, Any], **keys: Any) -> tuple[Any, Any, ReadDataset]:
    """(training dataset, validation dataset or None) of sd-scripts with the adapter, and the same as read here."""
    config = {"datasets": [{**BASE, **keys, "subsets": [dict(s, **_captions(s)) for s in subsets]}]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    read = read_config(folder / "config.json", release=Release.in_checkout(sd.root)).datasets[0]
    train, validation = build_groups(sd, config)
    return train.datasets[0], validation and validation.datasets[0], read


def _captions(subset: dict[str, Any]) -> dict[str, Any]:
    return {} if "metadata_file" in subset else {"caption_extension": ".txt"}


def names(dataset: Any) -> list[str]:
    return [Path(key).stem for key in dataset.image_data]


def sized(folder: Path, **sizes: tuple[int, int]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, size in sizes.items():
        Image.new("RGB", size).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("a caption", encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["folder", "cached", "metadata"])
def test_what_trains_is_what_was_planned(kind: str, skipping: SimpleNamespace, tmp_path: Path) -> None:
    images = write_images(tmp_path / "a", random_sizes(40, 3, 40, 200), formats=("png", "jpg", "webp"))
    regular = write_images(tmp_path / "r", random_sizes(15, 4, 40, 200))
    subset = {"image_dir": str(tmp_path / "a"), "num_repeats": 2}
    more = [{"image_dir": str(tmp_path / "r"), "is_reg": True}]
    keys: dict[str, Any] = {"validation_split": 0.3, "validation_seed": 5}
    if kind == "cached":
        subset["cache_info"] = True
        keys = {}
    elif kind == "metadata":
        subset["metadata_file"] = str(write_metadata(tmp_path / "meta.json", images))
        more, keys = [], {}
    train, validation, read = built(skipping, tmp_path, subset, *more, skip_image_resolution=[110, 120], **keys)
    assert list(train.image_data) == list(read.images.keys)
    assert [info.num_repeats for info in train.image_data.values()] == read.images.repeats.tolist()
    assert 5 < len(read.images.skipped) < len(images) + len(regular) - 5
    if validation is not None:
        assert list(validation.image_data) == list(read.validation.keys)
    regular_too = read.images.is_reg
    assert train.num_train_images == read.images.repeats[~regular_too].sum()
    counted = [subset.img_count for subset in train.subsets if not getattr(subset, "is_reg", False)]
    assert counted == [len(read.images) - regular_too.sum()]


def test_extended_webp_is_skipped_by_its_true_size(skipping: SimpleNamespace, tmp_path: Path) -> None:
    sized(tmp_path, plain=(64, 64))
    Image.new("RGBA", (65, 65), (1, 2, 3, 4)).save(tmp_path / "alpha.webp")
    (tmp_path / "alpha.txt").write_text("x", encoding="utf-8")
    train, _, read = built(skipping, tmp_path, {"image_dir": str(tmp_path)}, skip_image_resolution=64)
    assert names(train) == ["alpha"] == [Path(key).stem for key in read.images.keys]


def latents_of(path: Path, width: int, height: int) -> Path:
    """A latents file of SD 1.5 beside an image, whole except for what nobody looks at here."""
    name = path.with_name(f"{path.stem}_{width:04d}x{height:04d}_sd.npz")
    np.savez(name, latents=np.zeros((4, 8, 8), dtype=np.float32), original_size=[width, height], crop_ltrb=[0, 0, 0, 0])
    return name


def test_names_of_cached_latents_do_not_decide_for_others(skipping: SimpleNamespace, tmp_path: Path) -> None:
    sized(tmp_path, img_1=(60, 60), img_10=(150, 150), img_2=(150, 150), img_20=(60, 60))
    latents_of(tmp_path / "img_10.png", 150, 150)
    latents_of(tmp_path / "img_20.png", 60, 60)
    train, _, read = built(skipping, tmp_path, {"image_dir": str(tmp_path)}, skip_image_resolution=64)
    assert names(train) == ["img_10", "img_2"] == [Path(key).stem for key in read.images.keys]


def test_what_cannot_be_read_is_named(
    skipping: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sized(tmp_path, good=(150, 150), broken=(150, 150))
    (tmp_path / "broken.png").write_bytes(b"")
    train, _, _ = built(skipping, tmp_path, {"image_dir": str(tmp_path)}, skip_image_resolution=64)
    assert names(train) == ["good"]
    assert "broken.png" in caplog.text


# -- metadata ----------------------------------------------------------------------------------------


def test_latents_of_another_image_are_not_trained(patched: SimpleNamespace, tmp_path: Path) -> None:
    """Since 0.11.1 a cache whose name begins like an image's is trained in its place."""
    sized(tmp_path, img_1=(80, 64), img_10=(150, 150))
    latents_of(tmp_path / "img_10.png", 150, 150)
    file = write_metadata(tmp_path / "meta.json", [tmp_path / "img_1.png"])
    train, _, _ = built(patched, tmp_path, {"image_dir": str(tmp_path), "metadata_file": str(file)})
    (info,) = train.image_data.values()
    assert (info.absolute_path, info.image_size) == (str(tmp_path / "img_1.png"), (80, 64))
    assert info.latents_npz is None


@pytest.mark.parametrize("absolute", [True, False])
def test_keys_without_extension_keep_their_image_beside_a_cache(
    absolute: bool, patched: SimpleNamespace, tmp_path: Path
) -> None:
    if Feature.STEMS not in Release.in_checkout(patched.root):
        pytest.skip("this sd-scripts needs the whole file name")
    sized(tmp_path, img_1=(80, 64))
    latents_of(tmp_path / "img_1.png", 80, 64)
    key = str(tmp_path / "img_1") if absolute else "img_1"
    (tmp_path / "meta.json").write_text(json.dumps({key: {"caption": "x"}}), encoding="utf-8")
    subset = {"image_dir": str(tmp_path), "metadata_file": str(tmp_path / "meta.json")}
    train, _, read = built(patched, tmp_path, subset)
    (info,) = train.image_data.values()
    assert (info.absolute_path, info.image_size) == (read.images.paths[0], (80, 64))
    assert info.latents_npz is None
