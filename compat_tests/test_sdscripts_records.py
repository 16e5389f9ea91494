"""What stands in for sd-scripts' image records and file lists, against its own."""

import multiprocessing
import pickle

import pytest
import torch
from sdscripts_support import build_groups
from test_sdscripts_buckets import config_of
from test_sdscripts_epochs import loader_of

from kohya_bucket.trainers import sdscripts
from kohya_bucket.trainers.sdscripts.tables import ImageColumns


def facts(record):
    return {name: (type(value), value) for name, value in vars(record).items()}


@pytest.mark.parametrize("kind", ["dreambooth", "finetuning", "controlnet"])
def test_records_are_equal_before_and_after_a_loader_is_made(patched, tmp_path, kind):
    group, _ = build_groups(patched, config_of(kind, tmp_path))
    latents = torch.zeros(4, 16, 16)
    for dataset in group.datasets:
        first, second = list(dataset.image_data.values())[:2]
        first.latents, first.latents_crop_ltrb, second.latents_npz = latents, (0, 1.5, 64, 64), "cached.npz"
    before = [
        ({key: facts(info) for key, info in dataset.image_data.items()}, dict(dataset.image_to_subset))
        for dataset in group.datasets
    ]
    everything = {key: facts(info) for key, info in group.image_data.items()}
    loader_of(patched, group, multiprocessing.Value("i", 1))
    for dataset, (records, subsets) in zip(group.datasets, before, strict=True):
        assert isinstance(dataset.image_data, ImageColumns)
        assert {key: facts(info) for key, info in dataset.image_data.items()} == records
        assert dict(dataset.image_to_subset) == subsets
        assert next(iter(dataset.image_data.values())).latents is latents
        assert all(isinstance(info, patched.train_util.ImageInfo) for info in dataset.image_data.values())
        sent = pickle.loads(pickle.dumps(dataset.image_data))
        assert all(isinstance(info, patched.train_util.ImageInfo) for info in sent.values())
    assert {key: facts(info) for key, info in group.image_data.items()} == everything


def test_what_is_cached_after_the_loader_was_made_is_trained(patched, tmp_path):
    group, _ = build_groups(patched, config_of("dreambooth", tmp_path))
    epoch = multiprocessing.Value("i", 0)
    loader = loader_of(patched, group, epoch)
    for dataset in group.datasets:
        for info in dataset.image_data.values():
            width, height = info.bucket_reso
            info.latents = torch.full((4, height // 8, width // 8), 7.0)
            info.latents_original_size, info.latents_crop_ltrb = info.image_size, (0, 0, width, height)
    epoch.value = 1
    batches = list(loader)
    assert len(batches) == len(loader) > 10
    assert all((batch["latents"] == 7).all() for batch in batches)
    assert all(batch["images"] is None for batch in batches)


NAMES = ["b.png", "a.JPG", "c.jpeg", ".hidden.png", "d.txt", "e.WebP", "f.bmp", "png", ".png", "g.jpg.png", "ä [1].png"]


@pytest.mark.parametrize("folder", ["plain", "with [brackets]", "star*", "ordner ä", "missing", "."])
@pytest.mark.parametrize("ending", ["", "/", "//"])
def test_image_files_are_found_as_sd_scripts_finds_them(unpatched, tmp_path, monkeypatch, folder, ending):
    monkeypatch.chdir(tmp_path)
    if folder != "missing":
        (tmp_path / folder).mkdir(exist_ok=True)
        for name in NAMES:
            (tmp_path / folder / name).touch()
        (tmp_path / folder / "folder.png").mkdir()
    places = [folder + ending, str(tmp_path / folder) + ending]
    train_util = unpatched.train_util
    theirs = [train_util.glob_images(place, base) for place in places for base in ("*", "b")]
    sdscripts.install(quiet=True)
    ours = [train_util.glob_images(place, base) for place in places for base in ("*", "b")]
    sdscripts.uninstall()
    assert ours == theirs
    assert (folder == "missing") == (not theirs[0])
