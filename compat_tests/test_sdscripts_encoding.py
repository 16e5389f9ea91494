"""Latents encoded ahead of a training: the same, wherever they are kept and however often caching was stopped."""

import importlib
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sdscripts_support import MeanVAE, build_groups, cache_latents, random_sizes, write_images
from training_runs import train, write_config

from kohya_bucket.latents.vae.encoder import noise_seed
from kohya_bucket.trainers import sdscripts
from kohya_bucket.trainers.sdscripts.npz.read_write import OpenNpz
from tests.full_disk import NoRoom, small_disk  # noqa: F401

COUNT, STEPS = 13, 4
KEYS = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}


def sd():
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[8] * 4, norm_num_groups=2, latent_channels=4,
    )  # fmt: skip
    return importlib.import_module("library.strategy_sd").SdSdxlLatentsCachingStrategy, (True,), vae


def flux():
    models = importlib.import_module("library.flux_models")
    params = models.AutoEncoderParams(
        resolution=64, in_channels=3, ch=32, out_ch=3, ch_mult=[1, 1, 1, 1], num_res_blocks=1, z_channels=16,
        scale_factor=0.3611, shift_factor=0.1159,
    )  # fmt: skip
    return importlib.import_module("library.strategy_flux").FluxLatentsCachingStrategy, (), models.AutoEncoder(params)


def cached(unpatched, folder, family, to_disk=False):
    """Datasets whose latents are made."""
    kind, first, vae = family
    subset = {"image_dir": str(folder), "flip_aug": True}
    group, _ = build_groups(unpatched, {"datasets": [{**KEYS, "subsets": [subset]}]})
    cache_latents(group, vae, kind(*first, to_disk, 1, False))
    return group.datasets[0].image_data.values()


@pytest.mark.parametrize("make", [sd, flux])
def test_an_image_has_the_latent_that_sd_scripts_alone_draws_from_its_seed(unpatched, tmp_path, make):
    write_images(tmp_path / "a", random_sizes(COUNT, 1, 100, 300))
    torch.manual_seed(0)
    family = make()
    family[2].requires_grad_(False)
    torch.manual_seed(5)
    sdscripts.install()
    try:
        before = torch.get_rng_state()
        infos = list(cached(unpatched, tmp_path / "a", family))
        assert torch.equal(torch.get_rng_state(), before)
    finally:
        sdscripts.uninstall()
    ours = [(info.latents, info.latents_flipped) for info in infos]
    strategy = family[0](*family[1], False, 1, False)
    for info, (plain, flipped) in zip(infos, ours, strict=True):
        size = tuple(map(int, info.bucket_reso))
        torch.manual_seed(noise_seed(5, f"{Path(info.absolute_path).name} {size}"))
        strategy.cache_batch_latents(family[2], [info], True, False, False)
        torch.testing.assert_close(plain, info.latents, rtol=0, atol=2e-5)
        torch.testing.assert_close(flipped, info.latents_flipped, rtol=0, atol=2e-5)


def test_a_disk_that_is_full_leaves_whole_files_only(unpatched, small_disk):  # noqa: F811
    write_images(small_disk / "a", random_sizes(COUNT, 1, 64, 90), formats=("jpg",))
    family, room = sd(), NoRoom(small_disk, "tmpfs")
    sdscripts.install()
    try:
        with room.full(), pytest.raises(SystemExit, match=room.reason):
            cached(unpatched, small_disk / "a", family, to_disk=True)
        assert not [path for path in (small_disk / "a").iterdir() if "npz" in path.name]
        cached(unpatched, small_disk / "a", family, to_disk=True)
    finally:
        sdscripts.uninstall()
    assert len(list((small_disk / "a").glob("*.npz"))) == COUNT


@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_images_that_are_edited_while_others_are_encoded_are_encoded_again(unpatched, tmp_path, kind):
    paths = write_images(tmp_path / "a", random_sizes(COUNT, 1, 100, 300))
    table = {"latent_cache": kind} | ({"latent_cache_dir": str(tmp_path / "store")} if kind == "shards" else {})
    config = {"kohya_bucket": table, "datasets": [{**KEYS, "subsets": [{"image_dir": str(tmp_path / "a")}]}]}

    class Editing(MeanVAE):
        def encode(self, images):
            if not self.encoded:
                for n, path in enumerate(paths):
                    edited = tmp_path / "edited.png"
                    with Image.open(path) as image:
                        image.point(lambda value: 255 - value).save(edited)
                    os.utime(edited, ns=(n, n))
                    edited.replace(path)  # whole, for who reads it now
            return super().encode(images)

    sdscripts.install()
    try:
        for vae, encoded in ((Editing(), COUNT), (MeanVAE(), COUNT), (MeanVAE(), 0)):
            group, _ = build_groups(unpatched, config)
            cache_latents(group, vae)
            assert vae.encoded == encoded
    finally:
        sdscripts.uninstall()


@pytest.mark.parametrize("to_disk", [False, True])
def test_latents_that_are_not_finite_end_the_run_wherever_they_are_kept(unpatched, tmp_path, to_disk):
    write_images(tmp_path / "a", random_sizes(COUNT, 1, 100, 300))
    group, _ = build_groups(unpatched, {"datasets": [{**KEYS, "subsets": [{"image_dir": str(tmp_path / "a")}]}]})
    strategies = importlib.import_module("library.strategy_sd")
    vae = MeanVAE()
    vae.encode = lambda images: MeanVAE.encode(vae, images * float("nan"))
    sdscripts.install()
    try:
        with pytest.raises(SystemExit, match=r"its latent is not finite \(NaN or infinity\); it is not cached"):
            cache_latents(group, vae, strategies.SdSdxlLatentsCachingStrategy(True, to_disk, 2, False))
    finally:
        sdscripts.uninstall()


@pytest.fixture
def data(unpatched, tmp_path):
    write_images(tmp_path / "images", random_sizes(COUNT, 1, 100, 200))
    return tmp_path / "images"


class Trainings:
    """Runs that differ in where latents are kept."""

    def __init__(self, checkout, data, folder):
        self.checkout, self.data, self.folder = checkout, data, folder

    def __call__(self, name, kind, **more):
        table = "" if kind == "memory" else f"[kohya_bucket]\nlatent_cache = '{kind}'"
        if kind == "shards":
            table += f"\nlatent_cache_dir = '{self.folder / 'store'}'"
        options = ["--cache_latents", "--seed", 7, "--max_train_steps", STEPS]
        options += [] if kind == "memory" else ["--cache_latents_to_disk"]
        config = write_config(self.folder, self.data, table)
        return train(self.checkout, config, *options, out=self.folder / name, **more)

    def trained(self, name, kind, **more):
        run = self(name, kind, **more)
        run.assert_trained(STEPS)
        return run


@pytest.mark.slow
@pytest.mark.training_run("cached in memory, in npz and in shards")
def test_the_same_weights_from_memory_npz_and_shards_made_and_found(sd_scripts_dir, data, tmp_path):
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    training = Trainings(sd_scripts_dir, data, tmp_path)
    memory = training.trained("memory", "memory")
    assert f"{COUNT} latents were encoded in" in memory.log
    for kind, often in itertools.product(("npz", "shards"), ("made", "found")):
        run = training.trained(f"{kind} {often}", kind)
        assert ("latents were encoded in" in run.log) == (often == "made")
        assert run.tensors == memory.tensors


@pytest.mark.slow
@pytest.mark.training_run("a cached latent that is not finite")
def test_a_cached_latent_that_is_not_finite_is_made_again(sd_scripts_dir, data, tmp_path):
    training = Trainings(sd_scripts_dir, data, tmp_path)
    training.trained("first", "npz")
    path = next(data.glob("*.npz"))
    arrays = dict(np.load(path))
    name = next(name for name in arrays if name.startswith("latents"))
    arrays[name].flat[5] = np.nan
    np.savez(path, **arrays)
    again = training.trained("again", "npz")
    said = " ".join(again.log.split())  # the trainer's log breaks lines
    assert f"its {name} is not finite (NaN or infinity)" in said
    assert "1 latent was encoded" in said
    assert all(np.isfinite(array).all() for array in np.load(path).values() if array.dtype == np.float32)
    assert np.isfinite([mean for batch in again.batches for one in batch for mean in one["means"]]).all()


@pytest.mark.slow
@pytest.mark.posix("SIGKILL")
@pytest.mark.training_run("killed while it cached")
def test_a_run_that_is_killed_while_it_caches_leaves_whole_files_and_goes_on(sd_scripts_dir, data, tmp_path):
    training = Trainings(sd_scripts_dir, data, tmp_path)
    memory = training.trained("memory", "memory")
    launcher = str(Path(__file__).with_name("killed_while_caching.py"))
    for number, count in enumerate((1, 4)):
        run = training(f"killed {number}", "npz", door=(launcher, str(data), str(count)))
        assert run.status == -9, run.log[-3000:]
        assert not run.batches
        files = list(data.glob("*.npz"))
        assert len(files) >= count
        for file in files:
            with OpenNpz(file) as opened:
                assert not opened.fault()
            assert all(np.isfinite(array).all() for array in np.load(file).values() if array.dtype == np.float32)
    assert training.trained("rest", "npz").tensors == memory.tensors


@pytest.mark.slow
@pytest.mark.training_run("cached by 2 processes")
def test_two_processes_train_the_same_from_memory_and_from_files(sd_scripts_dir, data, tmp_path):
    """Each caches a part of what goes to files, and all of what stays in memory."""
    training = Trainings(sd_scripts_dir, data, tmp_path)
    memory, made, found = (
        training.trained(name, kind, ranks=2)
        for name, kind in (("memory", "memory"), ("made", "npz"), ("found", "npz"))
    )
    assert memory.tensors == made.tensors == found.tensors
