"""Latent caches of the real sd-scripts: its files are ours and ours are its, for every model family."""

import importlib
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from kohya_bucket.buckets import KohyaBuckets
from kohya_bucket.images import resize
from kohya_bucket.images.pixels import load_pixels
from kohya_bucket.images.resize import INTERPOLATIONS, resize_and_crop
from kohya_bucket.latents.fingerprint import (
    Fingerprint,
    Stale,
    StaleReason,
    as_text,
    source_now,
)
from kohya_bucket.latents.vae.encoder import noise_seed, normalize
from kohya_bucket.trainers.sdscripts.caching.npz_cache import NpzCache
from kohya_bucket.trainers.sdscripts.caching.session import (
    CacheItem,
    architecture_read_by,
    save_latents,
)
from kohya_bucket.trainers.sdscripts.checkout import npz_version
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
from kohya_bucket.trainers.sdscripts.npz.names import npz_path
from kohya_bucket.trainers.sdscripts.npz.read_write import (
    NpzLatents,
    read_npz,
    text_stale_reasons,
    write_arrays,
    write_npz,
)
from tests.latents.latent_helpers import stored_fingerprint, why_npz_bad

BUCKET = (128, 64)
SIZE = (300, 150)
STRATEGIES = {
    "sd": ("strategy_sd", "SdSdxlLatentsCachingStrategy", (True,)),
    "sdxl": ("strategy_sd", "SdSdxlLatentsCachingStrategy", (False,)),
    "sd3": ("strategy_sd3", "Sd3LatentsCachingStrategy", ()),
    "flux": ("strategy_flux", "FluxLatentsCachingStrategy", ()),
    "lumina": ("strategy_lumina", "LuminaLatentsCachingStrategy", ()),
    "hunyuan_image": ("strategy_hunyuan_image", "HunyuanImageLatentsCachingStrategy", ()),
    "anima": ("strategy_anima", "AnimaLatentsCachingStrategy", ()),
}


@pytest.fixture(params=STRATEGIES)
def family(request, unpatched: SimpleNamespace) -> SimpleNamespace:
    module, name, first = STRATEGIES[request.param]
    try:
        strategy = getattr(importlib.import_module(f"library.{module}"), name)(*first, True, 1, False)
    except ImportError as error:
        pytest.skip(f"this sd-scripts has no {module}, or lacks something it needs: {error}")
    arch = architecture_read_by(strategy)
    assert arch.name == request.param
    return SimpleNamespace(arch=arch, strategy=strategy)


def made(arch, seed=0, flip=True, mask=True):
    random = np.random.default_rng(seed)
    shape = arch.shape(BUCKET)
    return NpzLatents(
        random.standard_normal(shape, dtype=np.float32), SIZE, (0.0, 1.5, 128.0, 62.5),
        random.standard_normal(shape, dtype=np.float32) if flip else None,
        random.random(BUCKET[::-1], dtype=np.float32) if mask else None,
    )  # fmt: skip


def save_by_sdscripts(family, path, item):
    def tensor(array):
        return None if array is None else torch.from_numpy(array)

    family.strategy.save_latents_to_disk(
        str(path), tensor(item.latents), item.original_size, item.crop_ltrb, tensor(item.flipped),
        tensor(item.alpha_mask), family.arch.key_suffix(BUCKET),
    )  # fmt: skip


PRINT = Fingerprint(1, 2, "", "vae", BUCKET, BUCKET, (0, 0), "area/cv2", "float32", flip=True, mask=True)


@pytest.fixture
def own_files(family: SimpleNamespace) -> SimpleNamespace:
    """A family whose files are named as sd-scripts names them: without its code, no others are known."""
    if family.strategy.get_latents_npz_path("a.png", (5, 7)) != str(npz_path("a.png", (5, 7), family.arch)):
        pytest.skip(f"this fork names the files of {family.arch.name} otherwise; training finds and writes them")
    return family


def test_names_are_the_same(own_files, tmp_path):
    family, image = own_files, str(tmp_path / "a.b.png")
    for size in [(5, 7), SIZE, (12345, 8)]:
        assert str(npz_path(image, size, family.arch)) == family.strategy.get_latents_npz_path(image, size)


def test_the_kind_of_keys_is_known_with_the_code_and_without(own_files, sd_scripts_dir):
    family = own_files
    assert family.arch == ARCHITECTURES[family.arch.name].read_by(npz_version(sd_scripts_dir))


@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_files_are_equal_byte_for_byte(family, tmp_path, flip, mask):
    item = made(family.arch, flip=flip, mask=mask)
    save_by_sdscripts(family, tmp_path / "theirs.npz", item)
    write_npz(tmp_path / "ours.npz", item, BUCKET, family.arch)
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "theirs.npz").read_bytes()
    read = read_npz(tmp_path / "theirs.npz", BUCKET, family.arch)
    assert all(np.array_equal(getattr(read, f), getattr(item, f)) for f in vars(item))
    assert why_npz_bad(tmp_path / "theirs.npz", BUCKET, family.arch, flip=flip, mask=mask, content=True) is None


def test_the_fingerprint_disturbs_nobody(family, tmp_path):
    path, item = tmp_path / "a.npz", made(family.arch)
    write_npz(path, item, BUCKET, family.arch, PRINT, source_name="a.png")
    strategy = family.strategy
    assert strategy.is_disk_cached_latents_expected(BUCKET, str(path), True, True)
    latents, size, ltrb, flipped, mask = strategy.load_latents_from_disk(str(path), BUCKET)
    assert np.array_equal(latents, item.latents)
    assert np.array_equal(flipped, item.flipped)
    assert np.array_equal(mask, item.alpha_mask)
    assert (tuple(size), tuple(ltrb)) == (item.original_size, item.crop_ltrb)
    assert stored_fingerprint(path, BUCKET, family.arch) == (PRINT, "a.png")


def test_latents_that_sdscripts_writes_over_ours_lose_the_fingerprint(family, tmp_path):
    path = tmp_path / "a.npz"
    write_npz(path, made(family.arch), BUCKET, family.arch, PRINT, source_name="a.png")
    save_by_sdscripts(family, path, made(family.arch, seed=1))
    assert stored_fingerprint(path, BUCKET, family.arch) is None
    assert np.array_equal(read_npz(path, BUCKET, family.arch).latents, made(family.arch, seed=1).latents)


def cache_item(image, *args, **more):
    """Of an image as it is now."""
    return CacheItem(str(image), *args, source=source_now(image), **more)


def test_a_shard_loads_as_the_npz_does(family, tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from kohya_bucket.trainers.sdscripts.caching.shards import ShardCache

    image = tmp_path / "a.png"
    Image.new("RGB", SIZE).save(image)
    item = made(family.arch)
    item = replace(item, alpha_mask=np.round(item.alpha_mask * 255).astype(np.float32) / np.float32(255))
    save_by_sdscripts(family, tmp_path / "a.npz", item)
    cache = ShardCache(tmp_path / "store", tmp_path, family.arch)
    wanted = cache_item(image, BUCKET, SIZE, True, True)
    cache.refresh()
    assert cache.stale_reasons(wanted) == [StaleReason(Stale.MISSING)]
    cache.save(wanted, item.latents, item.crop_ltrb, item.flipped, item.alpha_mask)
    cache.finish()
    assert cache.stale_reasons(wanted) == []
    for ours, theirs in zip(
        cache.load(str(image), BUCKET), family.strategy.load_latents_from_disk(str(tmp_path / "a.npz"), BUCKET),
        strict=True,
    ):  # fmt: skip
        assert type(ours) is type(theirs)
        assert np.array_equal(ours, theirs)
    os.utime(image, ns=(1, 1))
    wanted = replace(wanted, source=source_now(image))
    assert cache.stale_reasons(wanted) == [StaleReason(Stale.SOURCE, "its modification time differs")]


def test_the_check_names_what_sdscripts_would_train_or_stop_at(family, tmp_path):
    image, path = tmp_path / "a.png", tmp_path / "a.npz"
    Image.new("RGB", SIZE).save(image)
    item = cache_item(image, BUCKET, SIZE, True, True)
    latents = made(family.arch)
    save_latents(path, item, family.arch, torch.from_numpy(latents.latents), latents.crop_ltrb,
                 torch.from_numpy(latents.flipped), torch.from_numpy(latents.alpha_mask))  # fmt: skip

    def reasons(**changes):
        wanted = replace(item, path=str(path), source=source_now(image), **changes)
        return as_text(NpzCache(family.arch).stale_reasons(wanted))

    assert reasons() == ""
    assert family.strategy.is_disk_cached_latents_expected(BUCKET, str(path), True, True)
    assert reasons(bucket_reso=(64, 128)) != ""
    assert "300x150 then, 300x151 now" in reasons(original_size=(300, 151))
    os.utime(image, ns=(1, 1))
    assert "modification time" in reasons()
    path.write_bytes(path.read_bytes()[:-7])
    assert "broken" in reasons()


class Deterministic(torch.nn.Module):
    """A small random VAE with the shapes of SD 1.5's."""

    def __new__(cls):
        diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
        torch.manual_seed(0)
        return diffusers.AutoencoderKL(
            block_out_channels=(8, 8, 8, 8), down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4, norm_num_groups=2, layers_per_block=1, latent_channels=4,
            scaling_factor=0.18215,
        )  # fmt: skip


IMAGES = [(300, 200), (200, 300), (129, 128), (100, 90), (640, 128)]


def images(folder: Path) -> list[Path]:
    random = np.random.default_rng(0)
    paths = []
    for k, (width, height) in enumerate(IMAGES):
        small = Image.fromarray(random.integers(0, 256, (9, 11, 4), dtype=np.uint8))
        paths.append(folder / f"i{k}.png")
        small.resize((width, height), Image.Resampling.BICUBIC).save(paths[-1])
    return paths


def info_of(sd, path, placement, i):
    info = sd.train_util.ImageInfo(path.name, 1, "", False, str(path))
    info.image_size = IMAGES[i]
    info.bucket_reso, info.resized_size = (
        tuple(map(int, a[i])) for a in (placement.bucket_sizes, placement.resized_sizes)
    )
    return info


@pytest.mark.parametrize("alpha", [False, True])
def test_pixels_are_the_same(unpatched, tmp_path, alpha):
    placement = KohyaBuckets((128, 128), 64, 256, 16).place(IMAGES)
    for name in INTERPOLATIONS:
        for i, path in enumerate(images(tmp_path)):
            info = info_of(unpatched, path, placement, i)
            arguments = (False, unpatched.train_util.load_image(str(path), alpha), info.bucket_reso, info.resized_size,
                         None if name == "auto" else name)  # fmt: skip
            theirs, _, ltrb = unpatched.train_util.trim_and_resize_if_required(*arguments)
            ours = resize_and_crop(load_pixels(path, alpha=alpha), info.resized_size, info.bucket_reso, name)
            assert np.array_equal(ours, theirs)
            assert np.array_equal(placement.crop_ltrb[i], ltrb)
            if not alpha:
                want = unpatched.train_util.IMAGE_TRANSFORMS(theirs)
                assert torch.equal(normalize(torch.from_numpy(ours)[None])[0], want)


def test_pixels_of_jpeg_are_the_same_too(unpatched, tmp_path):
    sizes = [(400, 301), (256, 256), (131, 500), (384, 384), (1000, 700)]
    placement = KohyaBuckets((128, 128), 64, 256, 16).place(sizes)
    for i, size in enumerate(sizes):
        noise = np.random.default_rng(i).integers(0, 256, (60, 80, 3), dtype=np.uint8)
        path = tmp_path / f"{i}.jpg"
        Image.fromarray(noise).resize(size).save(path, quality=90, progressive=i % 2 == 1)
        info = info_of(unpatched, path, placement, i)
        loaded = unpatched.train_util.load_image(str(path))
        theirs, _, _ = unpatched.train_util.trim_and_resize_if_required(
            False, loaded, info.bucket_reso, info.resized_size
        )
        assert np.array_equal(resize.resize_and_crop(load_pixels(path), info.resized_size, info.bucket_reso), theirs)


@pytest.mark.parametrize("mask", [False, True])
def test_precomputed_npz_are_what_sdscripts_encodes(unpatched, sd_scripts_dir, tmp_path, mask):
    strategy_sd = importlib.import_module("library.strategy_sd")
    from kohya_bucket.latents.encode.precompute import precompute_latents
    from kohya_bucket.latents.vae.diffusers_vae import DiffusersEncoder

    paths = images(tmp_path)
    sizes = np.array(IMAGES, dtype=np.int32)
    placement = KohyaBuckets((128, 128), 64, 256, 16).place(sizes)
    data = SimpleNamespace(paths=paths, sizes=sizes, placement=placement)
    report = precompute_latents(
        data, DiffusersEncoder(Deterministic()), NpzFiles("sd", tmp_path / "ours", npz_version(sd_scripts_dir)),
        flip=True, mask=mask, batch_size=2,
    )  # fmt: skip
    assert report.encoded == len(paths)
    strategy = strategy_sd.SdSdxlLatentsCachingStrategy(True, True, 1, False)
    arch = architecture_read_by(strategy)
    vae = Deterministic()
    for i, path in enumerate(paths):
        info = info_of(unpatched, path, placement, i)
        info.latents_npz = strategy.get_latents_npz_path(str(path), IMAGES[i])
        torch.manual_seed(noise_seed(0, path.name))
        strategy.cache_batch_latents(vae, [info], True, mask, False)
        ours_path = npz_path(tmp_path / "ours" / path.name, IMAGES[i], arch)
        assert strategy.is_disk_cached_latents_expected(info.bucket_reso, str(ours_path), True, mask)
        ours = read_npz(ours_path, info.bucket_reso, arch)
        theirs = read_npz(Path(info.latents_npz), info.bucket_reso, arch)
        assert ours.original_size == theirs.original_size
        assert ours.crop_ltrb == theirs.crop_ltrb
        np.testing.assert_allclose(ours.latents, theirs.latents, rtol=0, atol=2e-6)
        np.testing.assert_allclose(ours.flipped, theirs.flipped, rtol=0, atol=2e-6)
        assert np.array_equal(ours.alpha_mask, theirs.alpha_mask) if mask else theirs.alpha_mask is None


def test_text_encoder_outputs_in_place_of_numpys(unpatched, tmp_path):
    module = importlib.import_module("library.strategy_sdxl")
    strategy = module.SdxlTextEncoderOutputsCachingStrategy(True, 1, False)
    arrays = {name: np.random.default_rng(0).random((3, 4)) for name in ("hidden_state1", "hidden_state2", "pool2")}
    np.savez(tmp_path / "theirs", **arrays)
    write_arrays(tmp_path / "ours.npz", arrays)
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "theirs.npz").read_bytes()
    assert strategy.is_disk_cached_outputs_expected(str(tmp_path / "ours.npz"))
    assert text_stale_reasons(tmp_path / "ours.npz") == []
