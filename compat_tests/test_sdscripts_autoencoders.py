"""The VAEs of Anima and HunyuanImage: what is encoded here is what sd-scripts' own models and loops cache.

sd-scripts has these models in files of its own; here they are diffusers', which has them since 0.36, newer than
what sd-scripts pins.
"""

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sdscripts_support import random_sizes, write_images

from kohya_bucket.buckets import KohyaBuckets
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.fingerprint import module_hash, source_now
from kohya_bucket.latents.vae.encoder import noise_seed
from kohya_bucket.trainers.sdscripts.caching.npz_cache import NpzCache
from kohya_bucket.trainers.sdscripts.caching.session import CacheItem
from kohya_bucket.trainers.sdscripts.caching.shards import ShardCache
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
from kohya_bucket.trainers.sdscripts.npz.read_write import read_npz


def library(name):
    try:
        return importlib.import_module(f"library.{name}")
    except ImportError as error:
        pytest.skip(f"this sd-scripts has no {name}, or lacks something it needs: {error}")


def anima():
    """sd-scripts' model with few channels, and its strategy."""
    model, strategies = library("qwen_image_autoencoder_kl"), library("strategy_anima")
    torch.manual_seed(0)
    return model.AutoencoderKLQwenImage(base_dim=8).eval(), strategies.AnimaLatentsCachingStrategy


def hunyuan_image():
    model, strategies = library("hunyuan_image_vae"), library("strategy_hunyuan_image")
    torch.manual_seed(0)
    vae = model.HunyuanVAE2D.__new__(model.HunyuanVAE2D)  # its own sizes are fixed, and large
    torch.nn.Module.__init__(vae)
    widths = (32, 32, 64, 64, 128, 128)
    vae.encoder = model.Encoder(3, 64, widths, 2, 32)
    vae.decoder = model.Decoder(64, 3, list(reversed(widths)), 2, 32)
    vae.use_spatial_tiling = False
    return vae.eval(), strategies.HunyuanImageLatentsCachingStrategy


FAMILIES = {"anima": anima, "hunyuan_image": hunyuan_image}


@pytest.fixture(params=FAMILIES)
def family(request, unpatched):
    vae, strategy = FAMILIES[request.param]()
    return SimpleNamespace(arch=ARCHITECTURES[request.param], vae=vae, strategy=strategy(True, 1, False))


def images_of(sd, folder: Path):
    sizes = random_sizes(5, 3, 100, 300)
    paths = write_images(folder, sizes)
    placement = KohyaBuckets((128, 128), 64, 256, 32).place(np.array(sizes, dtype=np.int32))
    infos = []
    for i, path in enumerate(paths):
        info = sd.train_util.ImageInfo(path.name, 1, "", False, str(path))
        info.image_size = sizes[i]
        pairs = (tuple(map(int, a[i])) for a in (placement.bucket_sizes, placement.resized_sizes))
        info.bucket_reso, info.resized_size = pairs
        infos.append(info)
    return SimpleNamespace(paths=paths, sizes=np.array(sizes, dtype=np.int32), placement=placement), infos


def cached_by_sdscripts(family, infos):
    """Each image through sd-scripts' own loop; returns its files."""
    for info in infos:
        info.latents_npz = family.strategy.get_latents_npz_path(info.absolute_path, info.image_size)
        torch.manual_seed(noise_seed(0, Path(info.absolute_path).name))
        family.strategy.cache_batch_latents(family.vae, [info], True, False, False)
        yield Path(info.latents_npz)


def test_precomputed_npz_are_what_sdscripts_encodes(unpatched, family, tmp_path):
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    if not hasattr(diffusers, "AutoencoderKLHunyuanImage"):
        pytest.skip(f"diffusers {diffusers.__version__} has not these autoencoders")
    from safetensors.torch import load_file, save_file

    from kohya_bucket.latents.encode.precompute import precompute_latents
    from kohya_bucket.latents.vae.diffusers_vae import load_encoder

    data, infos = images_of(unpatched, tmp_path / "images")
    save_file(family.vae.state_dict(), tmp_path / "vae.safetensors")
    encoder = load_encoder(tmp_path / "vae.safetensors", device="cpu", dtype="float32")
    assert encoder.fingerprint == module_hash(family.vae.bfloat16())
    family.vae.float().load_state_dict(load_file(tmp_path / "vae.safetensors"))
    report = precompute_latents(data, encoder, NpzFiles(folder=tmp_path / "ours"), flip=True, batch_size=2)
    assert report.encoded == len(infos)
    for info, theirs_path in zip(infos, cached_by_sdscripts(family, infos), strict=True):
        ours_path = tmp_path / "ours" / theirs_path.name
        assert family.strategy.is_disk_cached_latents_expected(info.bucket_reso, str(ours_path), True, False)
        with np.load(ours_path) as ours, np.load(theirs_path) as theirs:
            assert set(theirs.files) == {name for name in ours.files if not name.startswith("kohya_bucket")}
            for name in theirs.files:
                assert ours[name].shape == theirs[name].shape
                assert ours[name].dtype == theirs[name].dtype
                np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-5)


def test_what_sdscripts_encodes_is_read_and_kept(unpatched, family, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    _, infos = images_of(unpatched, tmp_path / "images")
    cache = ShardCache(tmp_path / "store", tmp_path / "images", family.arch)
    cache.refresh()
    items = []
    for info, path in zip(infos, cached_by_sdscripts(family, infos), strict=True):
        item = CacheItem(
            info.absolute_path, info.bucket_reso, info.image_size, True, path=str(path),
            source=source_now(info.absolute_path),
        )  # fmt: skip
        npz = NpzCache(family.arch)
        assert (npz.stale_reasons(item), npz.moved) == ([], 0)
        found = read_npz(path, info.bucket_reso, family.arch)
        cache.save(item, found.latents, found.crop_ltrb, found.flipped)
        items.append((item, path))
    cache.finish()
    for item, path in items:
        theirs = family.strategy.load_latents_from_disk(str(path), item.bucket_reso)
        for ours, want in zip(cache.load(item.image, item.bucket_reso), theirs, strict=True):
            assert np.array_equal(ours, want)
            assert np.shape(ours) == np.shape(want)


def test_the_hash_of_flux_weights_is_of_the_model_that_sdscripts_makes_of_them(unpatched, tmp_path):
    from safetensors.torch import load_file, save_file

    from kohya_bucket.latents.vae.diffusers_vae import load_encoder

    flux = library("flux_models")
    torch.manual_seed(0)
    settings = flux.AutoEncoderParams(64, 3, 32, 3, [1, 1, 2, 2], 2, 16, 0.3611, 0.1159)
    theirs = flux.AutoEncoder(settings).eval()
    save_file(theirs.state_dict(), tmp_path / "ae.safetensors")
    if (
        "use_quant_conv"
        not in inspect.signature(importlib.import_module("diffusers").AutoencoderKL.__init__).parameters
    ):
        with pytest.raises(KohyaBucketError, match="is too old for this VAE: pip install -U diffusers"):
            load_encoder(tmp_path / "ae.safetensors", device="cpu", dtype="float32", architecture="flux")
        return
    encoder = load_encoder(tmp_path / "ae.safetensors", device="cpu", dtype="float32", architecture="flux")
    assert encoder.fingerprint == module_hash(theirs) == module_hash(theirs.bfloat16())
    pixels = torch.rand((1, 3, 64, 64)) * 2 - 1
    with torch.no_grad():
        theirs.float().load_state_dict(load_file(tmp_path / "ae.safetensors"))
        torch.testing.assert_close(encoder.posterior(pixels)[0], theirs.encoder(pixels).chunk(2, dim=1)[0])
        theirs.decoder.conv_in.bias += 1
    assert encoder.fingerprint != module_hash(theirs)
