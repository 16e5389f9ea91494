"""`kohya-bucket precompute --config` makes all that the real caching path then asks for, moved images included."""

import sys

import pytest
import toml
import torch
from PIL import Image
from sdscripts_support import build_groups, cache_latents
from several_sizes import COUNT, TABLES, assert_asked, at_size, batches_of, cached, config_of, sizes_of

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")

import kohya_bucket.cli  # noqa: E402
from kohya_bucket.latents.vae import diffusers_vae  # noqa: E402
from kohya_bucket.trainers.sdscripts.caching import extra_sizes as variants  # noqa: E402

SCALE = 0.18215


pytestmark = pytest.mark.usefixtures("unpatched")


def small_vae():
    """A VAE of random weights, without noise in what it samples."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 4, layers_per_block=1,
        up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=2, scaling_factor=SCALE,
    ).requires_grad_(False)  # fmt: skip
    vae.quant_conv.weight[4:] = 0
    vae.quant_conv.bias[4:] = -30
    return vae


@pytest.fixture
def precompute(monkeypatch, capsys, tmp_path):
    """Runs the command for a config; returns what it printed."""

    def load(name, dtype="float32", **_):
        return diffusers_vae.DiffusersEncoder(small_vae(), architecture="sd")

    monkeypatch.setattr(diffusers_vae, "load_encoder", load)

    def command(config, *options):
        file = tmp_path / "dataset.toml"
        file.write_text(toml.dumps(config), encoding="utf-8")
        kind = config["kohya_bucket"].get("latent_cache", "npz")
        where = ["-o", config["kohya_bucket"]["latent_cache_dir"]] if kind == "shards" else []
        fixed = ["--vae", "small", "--arch", "sd", "--format", kind, "--dtype", "float32", *where]
        monkeypatch.setattr(sys, "argv", ["kohya-bucket", "precompute", "--config", str(file), *fixed, *options])
        with pytest.raises(SystemExit) as ended:
            kohya_bucket.cli.main()
        printed = capsys.readouterr()
        assert not ended.value.code, printed.err
        return printed.out

    return command


def table_for(name, kind, tmp_path):
    if kind == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet", exc_type=ImportError)
    more = {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")} if kind == "shards" else {}
    return {**TABLES[name], **more}


def without_encoder(monkeypatch):
    vae = small_vae()
    monkeypatch.setattr(vae, "encode", None)
    return vae


def assert_latents(sd, group, batches):
    """Each cached latent is that of the picture which sd-scripts itself would make at the planned size."""
    vae = small_vae()
    for batch in batches:
        assert batch["images"] is None
        for key, latent, flipped in zip(batch["image_keys"], batch["latents"], batch["flippeds"], strict=True):
            picture = at_size(sd, group.datasets[0].image_data[key], sizes_of(batch))[None]
            picture = torch.flip(picture, dims=[3]) if flipped else picture
            assert torch.allclose(latent, vae.encode(picture).latent_dist.mean[0], atol=1e-3)


@pytest.mark.parametrize("kind", ["npz", "shards"])
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("no_upscale", [False, True], ids=["upscale", "no upscale"])
def test_training_encodes_nothing_more(patched, precompute, tmp_path, monkeypatch, name, kind, no_upscale):
    if no_upscale and name == "catch_all":
        pytest.skip("catch_all would enlarge")
    config = config_of(tmp_path, table_for(name, kind, tmp_path), bucket_no_upscale=no_upscale)
    config["datasets"][0]["subsets"][0]["flip_aug"] = True
    said = precompute(config)
    moves = TABLES[name].get("remainder") is not None
    assert ("moves images: for training in batches of 4" in said) == moves
    assert "at further sizes:" in said
    assert " encoded, 0 were current, 0 failed" in said
    again = precompute(config)
    assert [line for line in again.splitlines() if "encoded" in line and not line.startswith("0 encoded, ")] == []
    group = cached(patched, config, without_encoder(monkeypatch), True)
    seen = batches_of(patched, group, epochs=2)
    data = group.datasets[0].image_data
    if no_upscale:  # small images are trained at one resolution, and not scaled to cover their bucket
        assert all({key for batch in epoch for key in batch["image_keys"]} == set(data) for epoch in seen)
    else:
        assert_asked(seen, TABLES[name], data, 1)
        assert_latents(patched, group, [batch for epoch in seen for batch in epoch[::3]])


@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_what_is_moved_depends_on_the_number_of_gpus(patched, precompute, tmp_path, monkeypatch, kind):
    """With one shape per step; by default it does not."""
    table = table_for("catch_all", kind, tmp_path)
    config = config_of(tmp_path, table | {"step_shapes": "one"}, batch_size=2)
    precompute(config)
    cached(patched, config, without_encoder(monkeypatch), True)
    monkeypatch.setattr(variants, "world", lambda: (2, 0))
    with pytest.raises(TypeError, match="NoneType"):
        cached(patched, config, without_encoder(monkeypatch), True)
    assert "for training on 1, 2 GPUs in batches of 2" in precompute(config, "--gpus", "1,2")
    for gpus in (1, 2):
        monkeypatch.setattr(variants, "world", lambda gpus=gpus: (gpus, 0))
        cached(patched, config, without_encoder(monkeypatch), True)


@pytest.mark.parametrize("options", [{}, {"max_pixels": 5 * 128 * 128}], ids=str)
def test_other_options_that_decide_what_is_moved(patched, precompute, tmp_path, monkeypatch, options):
    config = config_of(tmp_path, {**TABLES["rotate and merge"], **options})
    said = precompute(config, "--gpus", "2")
    assert "on 2 GPUs" not in said
    monkeypatch.setattr(variants, "world", lambda: (2, 0))
    cached(patched, config, without_encoder(monkeypatch), True)


def test_the_batch_size_of_the_command_line(patched, precompute, tmp_path, monkeypatch):
    config = config_of(tmp_path, TABLES["merge"])
    silent = {**config, "datasets": [{k: v for k, v in config["datasets"][0].items() if k != "batch_size"}]}
    assert "in batches of 4" in precompute(silent, "--train-batch-size", "4")
    cached(patched, config, without_encoder(monkeypatch), True)


def test_images_that_share_a_name(patched, precompute, tmp_path, monkeypatch):
    """`a.png` and `a.jpg` of one size have files of their own, at further sizes too."""
    config = config_of(tmp_path, TABLES["all"])
    folder = tmp_path / "a"
    first = sorted(folder.glob("*.png"))[0]
    Image.open(first).convert("RGB").save(first.with_suffix(".jpg"))
    precompute(config)
    assert len(list(folder.glob("*_sd_at_*.npz"))) == COUNT + 1
    cached(patched, config, without_encoder(monkeypatch), True)


@pytest.mark.parametrize("kind", ["npz", "shards"])
@pytest.mark.parametrize("name", [None, "merge", "all"])
def test_datasets_that_have_the_same_images_at_two_resolutions(patched, precompute, tmp_path, monkeypatch, name, kind):
    """With a part held back for validation, images of one name and size, and a dataset that mirrors them."""
    table = table_for(name, kind, tmp_path) if name else {}
    table |= {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")} if kind == "shards" else {}
    config = config_of(tmp_path, TABLES["all"])
    config["kohya_bucket"] = table
    first = sorted((tmp_path / "a").glob("*.png"))[0]
    Image.open(first).save(first.with_suffix(".bmp"))
    (dataset,) = config["datasets"]
    held_back = {"validation_split": 0.3, "validation_seed": 1}
    mirrored = [{**dataset["subsets"][0], "flip_aug": True}]
    config["datasets"] = [
        {**dataset, **held_back}, {**dataset, **held_back, "resolution": 192, "subsets": mirrored},
        {**dataset, "resolution": 256},
    ]  # fmt: skip
    precompute(config)
    again = [line for line in precompute(config).splitlines() if "encoded" in line]
    assert again
    assert all(line.startswith("0 encoded, ") for line in again)
    groups = [group for group in build_groups(patched, config) if group is not None]
    from library import strategy_sd

    strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 2, False)
    for group in groups:
        cache_latents(group, without_encoder(monkeypatch), strategy)
    assert len(groups) == 2
    for group in groups:
        for dataset in group.datasets:
            assert len(dataset.image_data)
            for info in dataset.image_data.values():
                latents = strategy.load_latents_from_disk(info.latents_npz, info.bucket_reso)[0]
                assert latents.shape[1:] == (info.bucket_reso[1] // 8, info.bucket_reso[0] // 8)


@pytest.mark.parametrize("kind", ["npz", "shards"])
def test_datasets_that_want_flips_and_masks_of_the_same_images(patched, precompute, tmp_path, monkeypatch, kind):
    if kind == "shards":
        pytest.importorskip("pyarrow", reason="a store's manifest is Parquet", exc_type=ImportError)
    folder = tmp_path / "a"
    folder.mkdir()
    for i in range(3):
        Image.effect_noise((128, 128), 50).convert("RGBA").save(folder / f"{i}.png")
    keys = {"resolution": 128, "batch_size": 1, "enable_bucket": True, "min_bucket_reso": 64}
    datasets = [
        {**keys, "subsets": [{"image_dir": str(folder), "class_tokens": "x", **wish}]}
        for wish in ({"flip_aug": True}, {"alpha_mask": True}, {})
    ]
    table = {"latent_cache": "shards", "latent_cache_dir": str(tmp_path / "store")} if kind == "shards" else {}
    config = {"datasets": datasets, "kohya_bucket": table}
    for count in (3, 0):
        done = [line for line in precompute(config).splitlines() if " encoded, " in line]
        assert sum(int(line.split()[0]) for line in done) == count
    cached(patched, config, without_encoder(monkeypatch), True)
