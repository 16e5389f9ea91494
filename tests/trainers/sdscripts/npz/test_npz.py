"""sd-scripts' npz: names, keys, and nothing half-written."""

import os
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz import read_write as npz
from kohya_bucket.trainers.sdscripts.npz.names import CacheFile, cache_files, collisions, npz_path
from kohya_bucket.trainers.sdscripts.npz.read_write import OpenNpz
from tests.latents.latent_helpers import PRINT, stored_fingerprint, why_npz_bad

PLAIN = [ARCHITECTURES[name].read_by("0.10.1") for name in ("sd", "sdxl")]
ALL = [*ARCHITECTURES.values(), *PLAIN]
BUCKET = (128, 64)


def named(arch):
    return arch.name if arch.multi_resolution else f"{arch.name} until 0.10.1"


def sizes_in(path, arch):
    with OpenNpz(path) as file:
        return [bucket for bucket, _ in npz.sizes_in(file, arch)]


def item(arch, seed=0, bucket=BUCKET, flip=True, mask=True):
    random = np.random.default_rng(seed)
    shape = arch.shape(bucket)
    return npz.NpzLatents(
        random.standard_normal(shape, dtype=np.float32),
        (300, 150),
        (0.0, 1.5, 128.0, 62.5),
        random.standard_normal(shape, dtype=np.float32) if flip else None,
        random.random(bucket[::-1], dtype=np.float32) if mask else None,
    )


def equal(a, b):
    return all(np.array_equal(getattr(a, f), getattr(b, f)) for f in vars(a))


@pytest.mark.parametrize("arch", ALL, ids=named)
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("mask", [True, False])
def test_what_is_written_is_read(tmp_path, arch, flip, mask):
    path = npz_path(tmp_path / "a.png", (300, 150), arch)
    want = item(arch, flip=flip, mask=mask)
    npz.write_npz(path, want, BUCKET, arch, replace(PRINT, bucket_size=BUCKET), source_name="a.png")
    assert equal(npz.read_npz(path, BUCKET, arch), want)
    assert sizes_in(path, arch) == [BUCKET]
    assert stored_fingerprint(path, BUCKET, arch) == (replace(PRINT, bucket_size=BUCKET), "a.png")
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("arch", ALL, ids=named)
def test_a_second_resolution_is_added(tmp_path, arch):
    path, other = tmp_path / "a.npz", (64, 128)
    first, second = item(arch), item(arch, 1, other)
    npz.write_npz(path, first, BUCKET, arch, replace(PRINT, bucket_size=BUCKET), source_name="a.png")
    npz.write_npz(path, second, other, arch)
    assert equal(npz.read_npz(path, other, arch), second)
    assert equal(npz.read_npz(path, BUCKET, arch), first)
    assert stored_fingerprint(path, BUCKET, arch) == (replace(PRINT, bucket_size=BUCKET), "a.png")
    assert sorted(sizes_in(path, arch)) == [other, BUCKET]


def test_latents_named_for_another_size_are_of_none(tmp_path):
    arch = ARCHITECTURES["flux"]
    np.savez(tmp_path / "a.npz", **{f"latents{arch.key_suffix((64, 128))}": np.zeros(arch.shape(BUCKET), np.float32)})
    assert sizes_in(tmp_path / "a.npz", arch) == []


def test_latents_rewritten_by_another_program_have_no_fingerprint(tmp_path):
    for arch in ALL:
        path = tmp_path / f"a{arch.suffix}"
        npz.write_npz(path, item(arch), BUCKET, arch, replace(PRINT, bucket_size=BUCKET))
        with np.load(path) as file:
            arrays = dict(file)
        arrays[f"latents{arch.key_suffix(BUCKET)}"] += 1
        np.savez(path, **arrays)
        assert stored_fingerprint(path, BUCKET, arch) is None


def test_without_a_fingerprint_there_is_none(tmp_path):
    arch = ARCHITECTURES["sd"]
    npz.write_npz(tmp_path / "a.npz", item(arch), BUCKET, arch)
    assert stored_fingerprint(tmp_path / "a.npz", BUCKET, arch) is None
    assert stored_fingerprint(tmp_path / "missing.npz", BUCKET, arch) is None


@given(st.integers(0, 10**6), st.sampled_from(["flip", "cut"]))
def test_a_damaged_file_never_reads_as_other_latents(tmp_path_factory, seed, how):
    arch = ARCHITECTURES["flux"]
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    want = item(arch)
    npz.write_npz(path, want, BUCKET, arch)
    data = bytearray(path.read_bytes())
    at = np.random.default_rng(seed).integers(len(data))
    if how == "flip":
        data[at] ^= 1 << seed % 8
    else:
        del data[at:]
    path.write_bytes(data)
    try:
        got = npz.read_npz(path, BUCKET, arch)
    except LatentStoreError:
        return
    # what still reads is either untouched or an optional part whose name was hit
    for field in vars(want):
        value = getattr(got, field)
        assert value is None or np.array_equal(value, getattr(want, field))


def test_what_is_left_of_a_cache_is_replaced(tmp_path):
    arch = ARCHITECTURES["sd3"]
    npz.write_npz(tmp_path / "a.npz", item(arch), BUCKET, arch)
    (tmp_path / "a.npz").write_bytes((tmp_path / "a.npz").read_bytes()[:900])
    with pytest.raises(LatentStoreError, match="broken"):
        npz.read_npz(tmp_path / "a.npz", BUCKET, arch)
    npz.write_npz(tmp_path / "a.npz", item(arch), BUCKET, arch)
    assert equal(npz.read_npz(tmp_path / "a.npz", BUCKET, arch), item(arch))


def test_a_directory_that_points_before_the_file_is_damage(tmp_path):
    np.savez(tmp_path / "a.npz", latents=np.zeros((4, 8, 8), dtype=np.float32))
    with (tmp_path / "a.npz").open("r+b") as file:
        file.seek(-6, os.SEEK_END)
        begin = int.from_bytes(file.read(4), "little")
        file.seek(-6, os.SEEK_END)
        file.write((begin + 1000).to_bytes(4, "little"))
    with OpenNpz(tmp_path / "a.npz") as file, pytest.raises(npz.BrokenNpzError, match="a member at -1000"):
        file.shape("latents")


def test_wrong_shapes_are_refused(tmp_path):
    sd, flux = ARCHITECTURES["sd"], ARCHITECTURES["flux"]
    with pytest.raises(LatentStoreError, match="do not belong to sd"):
        npz.write_npz(tmp_path / "a.npz", item(flux), BUCKET, sd)
    npz.write_npz(tmp_path / "a.npz", item(flux), BUCKET, flux)
    with pytest.raises(LatentStoreError, match="no latents for 64x64"):
        npz.read_npz(tmp_path / "a.npz", (64, 64), flux)
    with pytest.raises(LatentStoreError, match="does not exist"):
        npz.read_npz(tmp_path / "b.npz", BUCKET, flux)


def test_names(tmp_path):
    sd, flux = ARCHITECTURES["sd"], ARCHITECTURES["flux"]
    image = tmp_path / "x.y.png"
    assert npz_path(image, (64, 1200), sd).name == "x.y_0064x1200_sd.npz"
    assert npz_path(image, (64, 12000), flux, shared=True).name == "x.y.png_0064x12000_flux.npz"
    (tmp_path / "x.y.npz").touch()
    assert npz_path(image, (64, 1200), sd).name == "x.y.npz"
    assert npz_path(image, (64, 1200), flux).name == "x.y_0064x1200_flux.npz"


@given(st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="_-.x0"), min_size=1, max_size=9),
       st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="_-.x0"), min_size=1, max_size=9),
       st.integers(1, 99999), st.integers(1, 99999), st.sampled_from(ALL))  # fmt: skip
def test_a_cache_is_that_of_exactly_this_image(stem, other, width, height, arch):
    assume(stem.strip("."))  # a name of dots alone has no extension
    assume(other.strip(".") and f"{other}.png" != stem)
    name = npz_path(f"{stem}.png", (width, height), arch).name
    folder = Path("nowhere").absolute()
    with mock.patch.object(os, "listdir", return_value=[name]):
        (found,) = cache_files([f"{folder}/{stem}.png"], arch)
        assert found == [CacheFile(folder / name)]
        if other != stem:
            assert list(cache_files([f"{folder}/{other}.png"], arch)) == [[]]


def test_the_known_prefix_case(tmp_path):
    (tmp_path / "img_10_0300x0200_sd.npz").touch()
    assert list(cache_files([str(tmp_path / "img_1.png")], ARCHITECTURES["sd"])) == [[]]


def test_images_that_would_share_a_file():
    images = ["b/a.png", "b/a.jpg", "b/a.webp", "c/a.png"]
    sizes = [(64, 64), (64, 64), (65, 64), (64, 64)]
    assert collisions(images, sizes) == {0}


def test_early_caches_of_anima_are_read_and_not_trained_from(tmp_path):
    arch, path = ARCHITECTURES["anima"], tmp_path / "a_0300x0150_anima.npz"
    want = item(arch)
    npz.write_npz(path, want, BUCKET, arch)
    with np.load(path) as file:
        arrays = dict(file)
    for name in ("latents_8x16", "latents_flipped_8x16"):
        arrays[name] = arrays[name][:, None]
    np.savez(path, **arrays)
    assert equal(npz.read_npz(path, BUCKET, arch), want)
    assert sizes_in(path, arch) == [BUCKET]
    # in one batch with newer ones they would not stack
    assert str(why_npz_bad(path, BUCKET, arch)) == "its latents has shape [16, 1, 8, 16], not [16, 8, 16]"
