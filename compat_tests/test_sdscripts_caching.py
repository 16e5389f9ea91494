"""Latent and text-encoder caches through sd-scripts' real caching loops and strategies, with a small encoder."""

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sdscripts_support import (
    ACCELERATOR,
    MeanVAE,
    build_groups,
    cache_latents,
    key_of,
    part_of,
    random_sizes,
    write_images,
)
from several_sizes import at_size

from kohya_bucket.buckets import KohyaBuckets
from kohya_bucket.trainers import sdscripts
from kohya_bucket.trainers.sdscripts.caching.session import architecture_read_by


def cache(sd, folder, encoder, table=None, **subset):
    """One run's caching; returns the group, ready to train."""
    keys = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
    subset = {"image_dir": str(folder), "caption_extension": ".txt", "flip_aug": True, **subset}
    config = {"datasets": [{**keys, "subsets": [subset]}], **({"kohya_bucket": table} if table else {})}
    group, _ = build_groups(sd, config)
    cache_latents(group, encoder)
    return group


def latents_of(sd, group, workers=0, context=None):
    """Latents by image, as the loader delivers them."""
    for dataset in group.datasets:
        dataset.debug_dataset = True
    epoch = multiprocessing.get_context(context).Value("i", 1)
    collator = sd.train_util.collator_class(epoch, epoch, group)
    loader = torch.utils.data.DataLoader(
        group, batch_size=1, shuffle=True, collate_fn=collator, num_workers=workers, multiprocessing_context=context
    )
    found = {}
    for batch in loader:
        for key, latent, flipped in zip(batch["image_keys"], batch["latents"], batch["flippeds"], strict=True):
            found[Path(key).name] = (latent.numpy(), flipped)
    return found


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "a", random_sizes(7, 1, 100, 300))
    return tmp_path / "a"


def test_npz_are_sd_scripts_own(unpatched, folder):
    theirs = MeanVAE()
    cache(unpatched, folder, theirs)
    before = {path.name: dict(np.load(path)) for path in folder.glob("*.npz")}
    assert (theirs.encoded, len(before)) == (14, 7)
    for path in folder.glob("*.npz"):
        path.unlink()
    sdscripts.install()
    try:
        cache(unpatched, folder, MeanVAE())
    finally:
        sdscripts.uninstall()
    for path in folder.glob("*.npz"):
        ours = dict(np.load(path))
        for name, array in before.pop(path.name).items():
            np.testing.assert_array_equal(ours[name], array)
            assert ours[name].dtype == array.dtype
    assert not before
    again = MeanVAE()
    cache(unpatched, folder, again)
    assert again.encoded == 0


@pytest.mark.parametrize("table", [{"latent_cache": "npz"}, {"latent_cache": "shards"}], ids=["npz", "shards"])
def test_only_what_changed_is_encoded_again(patched, folder, tmp_path, monkeypatch, caplog, table):
    monkeypatch.chdir(tmp_path)
    if table["latent_cache"] == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    encoder = MeanVAE()
    cache(patched, folder, encoder, table)
    assert encoder.encoded == 14
    cache(patched, folder, encoder, table)
    assert encoder.encoded == 14
    edited = folder / "img_003.png"
    pixels = np.asarray(Image.open(edited)).copy()
    Image.fromarray(255 - pixels).save(edited)
    os.utime(edited, ns=(0, 10**18))
    with caplog.at_level("WARNING", logger="kohya_bucket"):
        group = cache(patched, folder, encoder, table)
    assert encoder.encoded == 16
    assert "img_003.png" in caplog.text
    latent, _ = latents_of(patched, group)["img_003.png"]
    info = group.image_data[str(edited)]
    assert latent.shape[1:] == (info.bucket_reso[1] // 8, info.bucket_reso[0] // 8)
    assert len(latents_of(patched, group)) == 7
    encoder.weight += 1
    cache(patched, folder, encoder, table)
    assert encoder.encoded == 30


def test_a_cache_of_another_resolution_or_a_broken_one_is_made_again(patched, folder, caplog):
    encoder = MeanVAE()
    group = cache(patched, folder, encoder)
    paths = sorted(folder.glob("*.npz"))
    paths[0].write_bytes(paths[0].read_bytes()[:200])
    arrays = dict(np.load(paths[1]))
    arrays[key_of(arrays, "latents")] = np.zeros((4, 3, 3), np.float32)
    np.savez(paths[1], **arrays)
    with caplog.at_level("WARNING", logger="kohya_bucket"):
        group = cache(patched, folder, encoder)
    assert encoder.encoded == 18
    assert "2 caches could not be used" in caplog.text
    assert len(latents_of(patched, group)) == 7


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("remote", [False, True])
def test_shards_train_what_npz_train(patched, folder, tmp_path, workers, remote, monkeypatch):
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    monkeypatch.setenv("KOHYA_BUCKET_SHARDS", str(tmp_path / "kept"))
    if remote:
        pytest.importorskip("fsspec", reason="fsspec is not installed: object storage cannot be asked")
    npz = latents_of(patched, cache(patched, folder, MeanVAE()))
    store = f"memory://{tmp_path.name}/store" if remote else str(tmp_path / "store")
    table = {"latent_cache": "shards", "latent_cache_dir": store}
    encoder = MeanVAE()
    cache(patched, folder, encoder, table)
    made = encoder.encoded
    group = cache(patched, folder, encoder, table)
    assert encoder.encoded == made > 0
    shards = latents_of(patched, group, workers)
    assert shards.keys() == npz.keys()
    for name in npz:
        np.testing.assert_array_equal(shards[name][0], npz[name][0])
        assert shards[name][1] == npz[name][1]
    assert not list((tmp_path / "store").rglob("*.npz"))


@pytest.mark.slow
def test_shards_reach_spawned_workers(patched, folder, tmp_path):
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    table = {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}
    group = cache(patched, folder, MeanVAE(), table)
    assert len(latents_of(patched, group, 1, "spawn")) == 7


def test_text_encoder_outputs_of_another_caption_are_made_again(patched, folder, caplog):
    from library import strategy_base, strategy_sdxl

    class Strategy(strategy_sdxl.SdxlTextEncoderOutputsCachingStrategy):
        made = 0

        def cache_batch_outputs(self, tokenize_strategy, models, text_encoding_strategy, infos):
            for info in infos:
                Strategy.made += 1
                array = np.zeros((2, 3), np.float32)
                np.savez(info.text_encoder_outputs_npz, hidden_state1=array, hidden_state2=array, pool2=array)

    def run():
        Strategy.made = 0
        strategy_base.TextEncoderOutputsCachingStrategy._strategy = Strategy(True, 1, False)
        try:
            group = cache(patched, folder, MeanVAE())
            group.new_cache_text_encoder_outputs([], ACCELERATOR)
        finally:
            strategy_base.TextEncoderOutputsCachingStrategy._strategy = None
        return Strategy.made

    assert run() == 7
    assert run() == 0
    (folder / "img_002.txt").write_text("another caption", encoding="utf-8")
    broken = next(folder.glob("img_004*_te_outputs.npz"))
    broken.write_bytes(broken.read_bytes()[:-100])
    with caplog.at_level("WARNING", logger="kohya_bucket"):
        assert run() == 2
    assert "the caption changed" in caplog.text


def test_npz_of_unmodified_sd_scripts_are_trained_from_a_store(unpatched, folder, tmp_path):
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    from kohya_bucket.latents.fingerprint import module_hash
    from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
    from kohya_bucket.trainers.sdscripts.npz.exchange import import_npz

    encoder = MeanVAE()
    cache(unpatched, folder, encoder)
    images = sorted(folder.glob("*.png"))
    theirs = {image.name: dict(np.load(next(folder.glob(f"{image.stem}_*.npz")))) for image in images}
    done = import_npz(
        list(map(str, images)), tmp_path / "store", ARCHITECTURES["sd"], images_root=folder, vae=module_hash(encoder)
    )
    assert (done.done, done.skipped, encoder.encoded) == (len(images), [], 2 * len(images))
    for path in folder.glob("*.npz"):
        path.unlink()
    sdscripts.install()
    try:
        table = {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}
        found = latents_of(unpatched, cache(unpatched, folder, encoder, table))
    finally:
        sdscripts.uninstall()
    assert encoder.encoded == 2 * len(images)
    assert found.keys() == theirs.keys()
    for name, (latent, flipped) in found.items():
        np.testing.assert_array_equal(latent, part_of(theirs[name], "latents_flipped" if flipped else "latents"))


@pytest.fixture
def diffusers():
    return pytest.importorskip("diffusers", reason="diffusers is not installed")


def small_vae(diffusers):
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 4, layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=2, scaling_factor=0.18215,
    ).requires_grad_(False)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_what_precompute_encoded_is_not_encoded_again(patched, diffusers, folder, tmp_path, dtype, kind, monkeypatch):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from kohya_bucket.latents import precompute_latents
    from kohya_bucket.latents.vae.diffusers_vae import DiffusersEncoder
    from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles

    table = {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")} if kind == "shards" else {}
    paths = sorted(folder.glob("*.png"))
    sizes = np.array([Image.open(path).size for path in paths], dtype=np.int32)
    data = SimpleNamespace(
        paths=paths, sizes=sizes, placement=KohyaBuckets((128, 128), 64, 512, 64).place(sizes)
    )  # fmt: skip
    encoder = DiffusersEncoder(small_vae(diffusers), architecture="sd")
    output = NpzFiles() if kind == "npz" else tmp_path / "store"
    report = precompute_latents(data, encoder, output, flip=True, images_root=folder)
    assert report.encoded == len(paths)
    vae = small_vae(diffusers).to(dtype)
    monkeypatch.setattr(vae, "encode", None)
    again = cache(patched, folder, vae, table)
    assert len(latents_of(patched, again)) == len(paths)
    vae.encoder.conv_in.bias += 1
    with pytest.raises(TypeError, match="NoneType"):
        cache(patched, folder, vae, table)


class FluxVAE(MeanVAE):
    """As the Flux autoencoder, which gives its latents directly, in 16 channels."""

    def encode(self, images):
        return super().encode(images).latent_dist.sample().repeat(1, 4, 1, 1)


def family(name):
    """(encoder, new caching strategy) of a model family."""
    if name == "flux":
        from library import strategy_flux

        return FluxVAE(), strategy_flux.FluxLatentsCachingStrategy(True, 2, False)
    from library import strategy_sd

    return MeanVAE(), strategy_sd.SdSdxlLatentsCachingStrategy(name == "sd", True, 2, False)


def one_file_for_all_sizes(name):
    """SD's and SDXL's files hold several resolutions since 0.10.2, the others' always did."""
    return architecture_read_by(family(name)[1]).multi_resolution


def datasets_at(folder, *resolutions, **subset):
    """Datasets of the same images, one for each resolution."""
    keys = {"batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
    subset = {"image_dir": str(folder), "caption_extension": ".txt", **subset}
    return [{**keys, "resolution": resolution, "subsets": [subset]} for resolution in resolutions]


def cache_datasets(sd, name, datasets, table=None):
    """One run's caching; how many pictures were encoded, and the group, ready to train."""
    config = {"datasets": datasets, **({"kohya_bucket": table} if table else {})}
    group, _ = build_groups(sd, config)
    encoder, strategy = family(name)
    cache_latents(group, encoder, strategy)
    return encoder.encoded, group


def assert_each_batch_has_its_latents(sd, group):
    """In each dataset, every image once, with the latents of the picture at its bucket there."""
    for dataset in group.datasets:
        dataset.debug_dataset = True
        seen = []
        for batch in dataset:
            seen += batch["image_keys"]
            for key, latent in zip(batch["image_keys"], batch["latents"], strict=True):
                info = dataset.image_data[key]
                width, height = info.bucket_reso
                assert latent.shape[1:] == (height // 8, width // 8)
                picture = at_size(sd, info, info.bucket_reso)[None, :1]
                want = torch.nn.functional.avg_pool2d(picture, 8)[0].expand(len(latent), -1, -1)
                assert torch.allclose(latent, want, atol=1e-6)
        assert sorted(seen) == sorted(dataset.image_data)


@pytest.mark.parametrize("kind", ["npz", "shards"])
@pytest.mark.parametrize("name", ["sd", "sdxl", "flux"])
def test_datasets_that_have_the_same_images_at_two_resolutions(patched, folder, tmp_path, name, kind):
    table = None
    if kind == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
        table = {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}
    datasets = datasets_at(folder, 128, 192)
    for count in (14, 0):
        encoded, group = cache_datasets(patched, name, datasets, table)
        assert encoded == count
        assert_each_batch_has_its_latents(patched, group)
    files = (0, 0) if kind == "shards" else (7, 0 if one_file_for_all_sizes(name) else 7)
    found = len(list(folder.glob(f"*_{name}.npz"))), len(list(folder.glob(f"*_{name}_at_*x*.npz")))
    assert found == files


def test_the_first_dataset_keeps_sd_scripts_own_files(unpatched, folder):
    assert cache_datasets(unpatched, "sd", datasets_at(folder, 128))[0] == 7
    before = {path: dict(np.load(path)) for path in folder.glob("*.npz")}
    sdscripts.install()
    try:
        assert cache_datasets(unpatched, "sd", datasets_at(folder, 128, 192, 256, 128))[0] == 14
        assert cache_datasets(unpatched, "sd", datasets_at(folder, 128, 192, 256, 128))[0] == 0
    finally:
        sdscripts.uninstall()
    for path, arrays in before.items():
        with np.load(path) as now:
            for name, array in arrays.items():
                np.testing.assert_array_equal(now[name], array)
    assert len(list(folder.glob("*.npz"))) == (7 if one_file_for_all_sizes("sd") else 21)
    assert cache_datasets(unpatched, "sd", datasets_at(folder, 128))[0] == 0


def test_images_that_share_a_name_at_two_resolutions(patched, folder):
    first = sorted(folder.glob("*.png"))[0]
    Image.fromarray(255 - np.asarray(Image.open(first))).save(first.with_suffix(".bmp"))
    for count in (16, 0):
        encoded, group = cache_datasets(patched, "sd", datasets_at(folder, 128, 192))
        assert encoded == count
        assert_each_batch_has_its_latents(patched, group)


def test_the_weights_are_hashed_once_for_all_data_sets(patched, folder, monkeypatch):
    from kohya_bucket.trainers.sdscripts.caching import latents

    hashed = []
    monkeypatch.setattr(latents, "module_hash", lambda model: hashed.append(model) or f"hash {len(hashed)}")
    encoder = MeanVAE()
    cache(patched, folder, encoder)
    cache(patched, folder, encoder)
    assert len(hashed) == 1
    encoder.weight += 1
    cache(patched, folder, encoder)
    assert len(hashed) == 2


def test_nothing_of_every_image_is_kept_once_loaders_are_made(patched, folder):
    from library import strategy_base

    from kohya_bucket.trainers.sdscripts.caching import session

    group = cache(patched, folder, MeanVAE())
    strategy = strategy_base.LatentsCachingStrategy._strategy
    assert session.shared_by(strategy).names
    assert len(latents_of(patched, group)) == 7
    assert not session.shared_by(strategy).names
