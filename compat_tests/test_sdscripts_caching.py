"""Latent and text-encoder caches through sd-scripts' real caching loops and strategies, with a small encoder."""

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from sdscripts_support import MeanVAE, build_groups, random_sizes, write_images

from kohya_bucket import sdscripts
from kohya_bucket.buckets import KohyaBuckets

ACCELERATOR = SimpleNamespace(
    num_processes=1, process_index=0, device=torch.device("cpu"), wait_for_everyone=lambda: None
)


@pytest.fixture
def strategies(unpatched):
    try:
        from library import strategy_base, strategy_sd
    except ImportError:
        pytest.skip("this version has no caching strategies")
    if not hasattr(unpatched.train_util.BaseDataset, "new_cache_latents"):
        pytest.skip("this version has no caching strategies")
    return SimpleNamespace(base=strategy_base, sd=strategy_sd)


def cache(sd, strategies, folder, encoder, table=None, **subset):
    """One run's caching; returns the group, ready to train."""
    keys = {"resolution": 128, "batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
    subset = {"image_dir": str(folder), "caption_extension": ".txt", "flip_aug": True, **subset}
    config = {"datasets": [{**keys, "subsets": [subset]}], **({"kohya_bucket": table} if table else {})}
    group, _ = build_groups(sd, config)
    strategies.base.LatentsCachingStrategy._strategy = strategies.sd.SdSdxlLatentsCachingStrategy(True, True, 2, False)
    group.new_cache_latents(encoder, ACCELERATOR)
    group.set_current_strategies()
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


def test_npz_are_sd_scripts_own(unpatched, strategies, folder):
    theirs = MeanVAE()
    cache(unpatched, strategies, folder, theirs)
    before = {path.name: dict(np.load(path)) for path in folder.glob("*.npz")}
    assert (theirs.encoded, len(before)) == (14, 7)
    for path in folder.glob("*.npz"):
        path.unlink()
    sdscripts.install()
    try:
        cache(unpatched, strategies, folder, MeanVAE())
    finally:
        sdscripts.uninstall()
    for path in folder.glob("*.npz"):
        ours = dict(np.load(path))
        for name, array in before.pop(path.name).items():
            np.testing.assert_array_equal(ours[name], array)
            assert ours[name].dtype == array.dtype
    assert not before
    again = MeanVAE()
    cache(unpatched, strategies, folder, again)
    assert again.encoded == 0


@pytest.mark.parametrize("table", [{"latent_cache": "npz"}, {"latent_cache": "shards"}], ids=["npz", "shards"])
def test_only_what_changed_is_encoded_again(patched, strategies, folder, tmp_path, monkeypatch, caplog, table):
    monkeypatch.chdir(tmp_path)
    if table["latent_cache"] == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    encoder = MeanVAE()
    cache(patched, strategies, folder, encoder, table)
    assert encoder.encoded == 14
    cache(patched, strategies, folder, encoder, table)
    assert encoder.encoded == 14
    edited = folder / "img_003.png"
    pixels = np.asarray(Image.open(edited)).copy()
    Image.fromarray(255 - pixels).save(edited)
    os.utime(edited, ns=(0, 10**18))
    with caplog.at_level("WARNING", logger="kohya_bucket"):
        group = cache(patched, strategies, folder, encoder, table)
    assert encoder.encoded == 16
    assert "img_003.png" in caplog.text
    latent, _ = latents_of(patched, group)["img_003.png"]
    info = group.image_data[str(edited)]
    assert latent.shape[1:] == (info.bucket_reso[1] // 8, info.bucket_reso[0] // 8)
    assert len(latents_of(patched, group)) == 7
    encoder.weight += 1
    cache(patched, strategies, folder, encoder, table)
    assert encoder.encoded == 30


def test_a_cache_of_another_resolution_or_a_broken_one_is_made_again(patched, strategies, folder, caplog):
    encoder = MeanVAE()
    group = cache(patched, strategies, folder, encoder)
    paths = sorted(folder.glob("*.npz"))
    paths[0].write_bytes(paths[0].read_bytes()[:200])
    arrays = dict(np.load(paths[1]))
    arrays["latents"] = np.zeros((4, 3, 3), np.float32)
    np.savez(paths[1], **arrays)
    with caplog.at_level("WARNING", logger="kohya_bucket"):
        group = cache(patched, strategies, folder, encoder)
    assert encoder.encoded == 18
    assert "2 caches could not be used" in caplog.text
    assert len(latents_of(patched, group)) == 7


def test_images_that_differ_by_extension_have_caches_of_their_own(patched, strategies, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    Image.new("RGB", (128, 128), (0, 0, 0)).save(folder / "same.png")
    Image.new("RGB", (128, 128), (255, 255, 255)).save(folder / "same.bmp")
    for name in ("same.txt",):
        (folder / name).write_text("x", encoding="utf-8")
    group = cache(patched, strategies, folder, MeanVAE())
    found = latents_of(patched, group)
    assert found["same.png"][0].mean() == pytest.approx(-1)
    assert found["same.bmp"][0].mean() == pytest.approx(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_shards_train_what_npz_train(patched, strategies, folder, tmp_path, workers):
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    npz = latents_of(patched, cache(patched, strategies, folder, MeanVAE()))
    table = {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}
    group = cache(patched, strategies, folder, MeanVAE(), table)
    shards = latents_of(patched, group, workers)
    assert shards.keys() == npz.keys()
    for name in npz:
        np.testing.assert_array_equal(shards[name][0], npz[name][0])
        assert shards[name][1] == npz[name][1]
    assert not list((tmp_path / "store").rglob("*.npz"))


@pytest.mark.slow
def test_shards_reach_spawned_workers(patched, strategies, folder, tmp_path):
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    table = {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}
    group = cache(patched, strategies, folder, MeanVAE(), table)
    assert len(latents_of(patched, group, 1, "spawn")) == 7


def test_text_encoder_outputs_of_another_caption_are_made_again(patched, strategies, folder, caplog):
    from library import strategy_sdxl

    class Strategy(strategy_sdxl.SdxlTextEncoderOutputsCachingStrategy):
        made = 0

        def cache_batch_outputs(self, tokenize_strategy, models, text_encoding_strategy, infos):
            for info in infos:
                Strategy.made += 1
                array = np.zeros((2, 3), np.float32)
                np.savez(info.text_encoder_outputs_npz, hidden_state1=array, hidden_state2=array, pool2=array)

    def run():
        Strategy.made = 0
        strategies.base.TextEncoderOutputsCachingStrategy._strategy = Strategy(True, 1, False)
        try:
            group = cache(patched, strategies, folder, MeanVAE())
            group.new_cache_text_encoder_outputs([], ACCELERATOR)
        finally:
            strategies.base.TextEncoderOutputsCachingStrategy._strategy = None
        return Strategy.made

    numpys = np.savez
    assert run() == 7
    assert run() == 0
    (folder / "img_002.txt").write_text("another caption", encoding="utf-8")
    broken = next(folder.glob("img_004*_te_outputs.npz"))
    broken.write_bytes(broken.read_bytes()[:-100])
    with caplog.at_level("WARNING", logger="kohya_bucket"):
        assert run() == 2
    assert "the caption changed" in caplog.text
    assert np.savez is numpys


def test_the_option_is_checked(patched, strategies, folder):
    with pytest.raises(SystemExit, match="latent_cache is 'zip', but must be one of npz, shards"):
        cache(patched, strategies, folder, MeanVAE(), {"latent_cache": "zip"})


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
def test_what_precompute_encoded_is_not_encoded_again(
    patched, strategies, diffusers, folder, tmp_path, dtype, kind, monkeypatch
):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from kohya_bucket.latents import precompute_latents
    from kohya_bucket.latents.diffusers_vae import DiffusersEncoder

    table = {"latent_cache": kind, "latent_cache_dir": str(tmp_path / "store")}
    paths = sorted(folder.glob("*.png"))
    sizes = np.array([Image.open(path).size for path in paths], dtype=np.int32)
    data = SimpleNamespace(
        paths=paths, sizes=sizes, placement=KohyaBuckets((128, 128), 64, 512, 64).place(sizes)
    )  # fmt: skip
    encoder = DiffusersEncoder(small_vae(diffusers), architecture="sd")
    output = None if kind == "npz" else tmp_path / "store"
    report = precompute_latents(data, encoder, output, format=kind, flip=True, images_root=folder)
    assert report.encoded == len(paths)
    vae = small_vae(diffusers).to(dtype)
    monkeypatch.setattr(vae, "encode", None)
    again = cache(patched, strategies, folder, vae, table)
    assert len(latents_of(patched, again)) == len(paths)
    vae.encoder.conv_in.bias += 1
    with pytest.raises(TypeError, match="NoneType"):
        cache(patched, strategies, folder, vae, table)


def test_data_sets_that_have_the_same_images_at_two_resolutions(patched, strategies, folder, tmp_path):
    pytest.importorskip("pyarrow", reason="a store's manifest is Parquet")
    keys = {"batch_size": 2, "enable_bucket": True, "min_bucket_reso": 64, "max_bucket_reso": 512}
    subset = {"image_dir": str(folder), "caption_extension": ".txt"}
    datasets = [{**keys, "resolution": resolution, "subsets": [subset]} for resolution in (128, 192)]
    table = {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")}
    encoder = MeanVAE()
    for _ in range(2):
        group, _ = build_groups(patched, {"datasets": datasets, "kohya_bucket": table})
        strategy = strategies.sd.SdSdxlLatentsCachingStrategy(True, True, 2, False)
        strategies.base.LatentsCachingStrategy._strategy = strategy
        group.new_cache_latents(encoder, ACCELERATOR)
        assert encoder.encoded == 14
    for dataset in group.datasets:
        for info in dataset.image_data.values():
            latents = strategy.load_latents_from_disk(info.latents_npz, info.bucket_reso)[0]
            assert latents.shape[1:] == (info.bucket_reso[1] // 8, info.bucket_reso[0] // 8)


def test_the_weights_are_hashed_once_for_all_data_sets(patched, strategies, folder, monkeypatch):
    from kohya_bucket.sdscripts import caching

    hashed = []
    monkeypatch.setattr(caching, "module_hash", lambda model: hashed.append(model) or f"hash {len(hashed)}")
    encoder = MeanVAE()
    cache(patched, strategies, folder, encoder)
    cache(patched, strategies, folder, encoder)
    assert len(hashed) == 1
    encoder.weight += 1
    cache(patched, strategies, folder, encoder)
    assert len(hashed) == 2
