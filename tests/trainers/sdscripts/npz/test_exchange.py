"""npz and store, both ways."""

import json
import os
import time
from dataclasses import replace

import numpy as np
import pytest

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents import LatentStore, precompute_latents
from kohya_bucket.latents.fingerprint import Stale, StaleReason
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.vae.encoder import encoder_hash
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.exchange import export_npz, import_npz
from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
from kohya_bucket.trainers.sdscripts.npz.names import further_path, npz_path
from kohya_bucket.trainers.sdscripts.npz.read_write import read_npz, write_npz
from tests.latents.latent_helpers import why_npz_bad
from tests.latents.stub_encoders import MeanEncoder, PosteriorStub, dataset_of, make_images
from tests.trainers.sdscripts.npz.test_npz import equal, item

BUCKET = (128, 64)
SIZES = [(300, 150), (100, 60), (64, 64)]


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_there_and_back_is_the_same_to_the_byte(tmp_path, arch):
    images = [str(p) for p in make_images(tmp_path / "images", [(300, 150)] * 3)]
    for k, image in enumerate(images):
        made = item(arch, k, flip=True, mask=k > 0)
        mask = None if k == 0 else np.round(made.alpha_mask * 255).astype(np.float32) / np.float32(255)
        mask = np.ones_like(mask) if k == 2 else mask
        write_npz(npz_path(image, (300, 150), arch), replace(made, alpha_mask=mask), BUCKET, arch)
    found = import_npz(images, tmp_path / "store", arch, images_root=tmp_path / "images")
    assert (found.done, found.skipped) == (3, [])
    store = LatentStore(tmp_path / "store")
    assert export_npz(store, arch, tmp_path / "back").done == 3
    for image in images:
        name = npz_path(image, (300, 150), arch).name
        before, after = (read_npz(tmp_path / folder / name, BUCKET, arch) for folder in ("images", "back"))
        assert equal(before, after)


def test_several_resolutions_of_one_file(tmp_path):
    arch = ARCHITECTURES["flux"]
    (image,) = make_images(tmp_path / "images", [(300, 150)])
    path = npz_path(image, (300, 150), arch)
    for bucket in [(64, 32), BUCKET]:
        write_npz(path, item(arch, bucket=bucket), bucket, arch)
    import_npz([str(image)], tmp_path / "store", arch, images_root=tmp_path)
    store = LatentStore(tmp_path / "store")
    assert store.strings("collection") == ["", "@45"]
    assert store.bucket_sizes.tolist() == [[128, 64], [64, 32]]


def test_captions_in_the_store_stay(tmp_path):
    arch, images = ARCHITECTURES["sd"], make_images(tmp_path / "images", [(64, 64)] * 2)
    precompute_latents(dataset_of(images, ["a", "b"]), MeanEncoder(), tmp_path / "store")
    for image in images:
        write_npz(npz_path(str(image), (64, 64), arch), item(arch, bucket=(64, 64)), (64, 64), arch)
    import_npz(list(map(str, images)), tmp_path / "store", arch, images_root=tmp_path / "images")
    store = LatentStore(tmp_path / "store")
    assert (store.strings("caption"), store.replaced_rows()) == (["a", "b"], 2)


def test_what_is_not_to_be_trusted_is_skipped_and_named(tmp_path):
    arch = ARCHITECTURES["sdxl"]
    images = make_images(tmp_path / "images", [(300, 150)] * 4)
    paths = [npz_path(image, (300, 150), arch) for image in images]
    for k in range(3):
        write_npz(paths[k], item(arch), BUCKET, arch)
    bad = item(arch)
    bad.latents[0, 0, 0] = np.nan
    write_npz(paths[3], bad, BUCKET, arch)
    paths[0].write_bytes(paths[0].read_bytes()[:500])
    os.utime(paths[1], ns=(1, 1))
    found = import_npz([str(p) for p in images], tmp_path / "store", arch, images_root=tmp_path)
    assert found.done == 1
    reasons = dict(found.skipped)
    assert "is not finite (NaN or infinity)" in reasons[str(paths[3])]
    assert "broken" in reasons[str(paths[0])]
    assert "newer than its" in reasons[str(paths[1])]


@pytest.mark.posix("on Windows a file does not say when it was renamed")
def test_images_that_were_renamed_since_are_not_believed_to_be_those_of_their_caches(tmp_path):
    arch = ARCHITECTURES["sdxl"]
    images = make_images(tmp_path / "images", [(300, 150)] * 3)
    for image in images:
        write_npz(npz_path(image, (300, 150), arch), item(arch), BUCKET, arch)
        os.utime(image, ns=(1, 1))  # as all that a dataset's archive brings
        os.utime(npz_path(image, (300, 150), arch))
    time.sleep(0.05)  # longer than a tick of the clock of files
    images[0].rename(tmp_path / "other.png")
    images[1].rename(images[0])
    (tmp_path / "other.png").rename(images[1])
    found = import_npz([str(p) for p in images], tmp_path / "store", arch, images_root=tmp_path)
    assert found.done == 1
    assert all("newer than its cache" in why for _, why in found.skipped)


def npz_run(images, **settings):
    return precompute_latents(dataset_of(images), PosteriorStub(), NpzFiles("sd"), **settings)


def test_precomputed_npz_lie_beside_the_images_and_are_current(tmp_path):
    arch = ARCHITECTURES["sd"]
    images = make_images(tmp_path / "images", SIZES)
    report = npz_run(images, flip=True, mask=True)
    assert report.encoded == len(images)
    dataset = dataset_of(images)
    for i, (image, size) in enumerate(zip(images, SIZES, strict=True)):
        path = npz_path(image, size, arch)
        bucket = tuple(map(int, dataset.placement.bucket_sizes[i]))
        assert why_npz_bad(path, bucket, arch, original_size=size, flip=True, mask=True, content=True) is None
        assert np.array_equal(read_npz(path, bucket, arch).crop_ltrb, dataset.placement.crop_ltrb[i])
    assert npz_run(images, flip=True, mask=True).encoded == 0
    assert {p.suffix for p in (tmp_path / "images").iterdir()} == {".png", ".npz"}


def test_npz_and_shards_hold_the_same_samples(tmp_path):
    arch = ARCHITECTURES["sd"]
    images = make_images(tmp_path / "images", SIZES)
    npz_run(images)
    precompute_latents(dataset_of(images), PosteriorStub(), tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    for image, size in zip(images, SIZES, strict=True):
        (i,) = store.find([image.name])
        bucket = tuple(map(int, store.bucket_sizes[i]))
        assert np.array_equal(read_npz(npz_path(image, size, arch), bucket, arch).latents, store.read(i))


def test_scaled_latents_are_exported_raw(tmp_path):
    images = make_images(tmp_path / "images", SIZES)
    precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "store")
    store = LatentStore(tmp_path / "store")
    export_npz(store, ARCHITECTURES["sd"], images_root=tmp_path / "images")
    arch = ARCHITECTURES["sd"]
    bucket = tuple(map(int, store.bucket_sizes[0]))
    assert np.array_equal(read_npz(npz_path(images[0], SIZES[0], arch), bucket, arch).latents, store.read(0) / 0.5)


def test_a_posterior_is_no_npz(tmp_path):
    images = make_images(tmp_path / "images", SIZES)
    for some, posterior in ((images[:1], False), (images[1:], True)):
        precompute_latents(dataset_of(some), PosteriorStub(), tmp_path / "store", posterior=posterior)
    with pytest.raises(LatentStoreError, match="posterior"):
        export_npz(LatentStore(tmp_path / "store"), ARCHITECTURES["sd"], images_root=tmp_path / "images")
    assert not list(tmp_path.rglob("*.npz"))  # the first item could have been written


@pytest.mark.long
@pytest.mark.parametrize("change", ["edit", "flip", "mask", "cut", "other resolution", "other VAE", "other image"])
def test_each_change_makes_exactly_the_concerned_npz_again(tmp_path, change):
    arch = ARCHITECTURES["sd"]
    images = make_images(tmp_path / "images", SIZES)
    npz_run(images)
    path = npz_path(images[0], SIZES[0], arch)
    settings, encoder, area, expected = {}, PosteriorStub(), (64, 64), 1
    if change == "edit":
        os.utime(images[0], ns=(1, 1))
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:300])
    elif change in ("flip", "mask"):
        settings, expected = {change: True}, len(images)
    elif change == "other resolution":
        area, expected = (96, 96), len(images)
    elif change == "other VAE":
        encoder.fingerprint, expected = "others", len(images)
    else:
        images[0] = images[0].rename(images[0].with_suffix(".jpeg"))

    def again():
        return precompute_latents(dataset_of(images, area=area), encoder, NpzFiles("sd"), **settings)

    assert again().encoded == expected
    assert again().encoded == 0


def test_two_images_of_one_name_get_two_files(tmp_path):
    one, other = make_images(tmp_path / "images", [(64, 64)] * 2)
    other = other.rename(one.with_suffix(".jpeg"))
    report = npz_run([one, other])
    assert report.encoded == 2
    assert sum("same name and size" in note for note in report.notes) == 1
    assert {p.name for p in (tmp_path / "images").glob("*.npz")} == {
        "img_000_0064x0064_sd.npz",
        "img_000.png_0064x0064_sd.npz",
    }
    assert npz_run([one, other]).encoded == 0


def test_files_of_unmodified_sd_scripts_count_until_the_image_is_newer(tmp_path):
    arch = ARCHITECTURES["sd"]
    images = make_images(tmp_path / "images", SIZES)
    npz_run(images)
    forget_what_they_were_made_from(images, dataset_of(images), arch)
    assert npz_run(images).encoded == 0
    later = npz_path(images[0], SIZES[0], arch).stat().st_mtime_ns + 10**9
    os.utime(images[0], ns=(later, later))
    assert npz_run(images).encoded == 1


def forget_what_they_were_made_from(images, dataset, arch):
    """As files that sd-scripts made itself."""
    for i, (image, size) in enumerate(zip(images, SIZES, strict=True)):
        bucket = tuple(map(int, dataset.placement.bucket_sizes[i]))
        path = npz_path(image, size, arch)
        write_npz(path, read_npz(path, bucket, arch), bucket, arch)


@pytest.mark.long
def test_imported_files_need_not_be_encoded_again_where_their_vae_is_known(tmp_path):
    arch = ARCHITECTURES["sd"]
    images = make_images(tmp_path / "images", SIZES)
    npz_run(images)
    dataset = dataset_of(images)
    forget_what_they_were_made_from(images, dataset, arch)
    names = [str(path) for path in images]

    def encoded(store, **settings):
        import_npz(names, tmp_path / store, arch, images_root=tmp_path / "images", **settings)
        return precompute_latents(dataset, PosteriorStub(), tmp_path / store).encoded

    vae = encoder_hash(PosteriorStub())
    assert encoded("known", vae=vae) == 0
    assert encoded("unknown") == len(images)
    assert encoded("another", vae="0" * 32) == len(images)


def test_files_of_further_sizes_are_imported_too(tmp_path):
    arch = ARCHITECTURES["sd"]
    images = make_images(tmp_path / "images", [(300, 150), (100, 60)])
    for image, size in zip(images, [(300, 150), (100, 60)], strict=True):
        path = npz_path(image, size, arch)
        write_npz(path, item(arch), BUCKET, arch)
        write_npz(further_path(path, (64, 64)), item(arch, 1, bucket=(64, 64)), (64, 64), arch)
    (tmp_path / "images" / "img_009_0300x0150_sd_at_0064x0064.npz").write_bytes(b"of no image")
    found = import_npz([str(p) for p in images], tmp_path / "store", arch, images_root=tmp_path / "images",
                       collection="sd")  # fmt: skip
    assert (found.done, found.skipped) == (4, [])
    store = LatentStore(tmp_path / "store")
    assert sorted(store.strings("collection")) == ["sd", "sd", "sd to 64x64", "sd to 64x64"]
    (i,) = store.find([images[1].name], "sd to 64x64")
    assert np.array_equal(store.read(i), item(arch, 1, bucket=(64, 64)).latents)


def test_why_bad_names_the_part(tmp_path):
    arch = ARCHITECTURES["sd"].read_by("0.10.1")
    path = tmp_path / "a.npz"
    assert why_npz_bad(path, BUCKET, arch) == StaleReason(Stale.MISSING)
    write_npz(path, item(arch, flip=False, mask=False), BUCKET, arch)
    assert why_npz_bad(path, BUCKET, arch) is None
    assert why_npz_bad(path, BUCKET, arch, flip=True) == StaleReason(Stale.PART, "latents_flipped")
    assert why_npz_bad(path, (64, 64), arch) == StaleReason(Stale.SHAPE, "latents", [4, 8, 16], [4, 8, 8])
    assert why_npz_bad(path, BUCKET, arch, original_size=(300, 151)) == StaleReason(
        Stale.IMAGE_SIZE, 300, 150, 300, 151
    )
    data = bytearray(path.read_bytes())
    data[400] ^= 1
    path.write_bytes(data)
    assert "latents" in str(why_npz_bad(path, BUCKET, arch, content=True))
    path.write_bytes(b"no zip")
    assert why_npz_bad(path, BUCKET, arch).kind is Stale.BROKEN


def test_nothing_is_exported_outside_the_folder_that_was_named(tmp_path):
    inside = make_images(tmp_path / "a", SIZES)
    outside = make_images(tmp_path / "b", SIZES[:1])
    for images in (inside, outside):
        precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "store")
    store, arch = LatentStore(tmp_path / "store"), ARCHITECTURES["sd"]
    assert "../b/img_000.png" in store.strings("source")
    for folders in ({"output": tmp_path / "npz"}, {"images_root": tmp_path / "a"}):
        done = export_npz(store, arch, **folders)
        assert (done.done, [name for name, _ in done.skipped]) == (3, ["../b/img_000.png"])
    assert not list((tmp_path / "b").glob("*.npz"))


@pytest.mark.long
@pytest.mark.parametrize("images", ["../../home", "../images", "/", "{home}"])
def test_a_store_names_no_place_to_write_to(tmp_path, command_line, images):
    """Whoever has a store from somebody else writes where they say, and not where the store says."""
    home = tmp_path / "home"
    home.mkdir()
    make_images(tmp_path / "images", SIZES)
    root = tmp_path / "stores" / "store"
    precompute_latents(dataset_of(list((tmp_path / "images").iterdir())), MeanEncoder(), root)
    Layout(root).store_file.write_text(json.dumps(
        {"format": "kohya_bucket.latents", "version": 1, "images": images.format(home=home.as_posix())}
    ), encoding="utf-8")  # fmt: skip
    before = sorted(tmp_path.rglob("*"))
    code, _, errors = command_line("cache", "export", root, "--arch", "sd", "--quiet")
    assert (code, "add --image-dir" in errors, "Traceback" in errors) == (2, True, False)
    assert sorted(tmp_path.rglob("*")) == before
    code, said, _ = command_line("cache", "export", root, "--arch", "sd", "--quiet", "--image-dir", tmp_path / "images")
    assert (code, "3 latents exported, 0 skipped" in said) == (0, True)
    assert list(home.iterdir()) == []


def test_fewer_exported_than_asked_for_is_said(tmp_path, command_line):
    root, out = tmp_path / "store", tmp_path / "npz"
    images = make_images(tmp_path / "images", SIZES)
    precompute_latents(dataset_of(images), MeanEncoder(), root)
    store = LatentStore(root)
    victim = store.layout.shards / store.info(0).name
    held = [name for name, i in zip(store.strings("source"), range(len(store)), strict=True)
            if store.info(i).name == victim.name]  # fmt: skip
    data = bytearray(victim.read_bytes())
    data[store.info(0).tensors["latents"].offset + 2] ^= 1
    victim.write_bytes(data)
    code, said, _ = command_line("cache", "export", root, "--arch", "sd", "--quiet", "--output", out)
    assert (code, "2 latents exported, 1 skipped" in said, held[0] in said) == (1, True, True)
    victim.write_bytes(data[:-30])
    for command in (["export", root, "--arch", "sd", "--quiet", "--output", out], ["pack", root], ["prune", root]):
        code, said, errors = command_line("cache", *command)
        assert (code, f"{victim.name}: truncated" in said, held[0] in said) == (1, True, True), command
        assert "1 file is gone or damaged, so" in errors
    assert command_line("cache", "prune", root, "--damaged")[0] == 0
    assert command_line("cache", "pack", root)[0] == 0


@pytest.mark.long
@pytest.mark.parametrize("part", ["latents", "latents_flipped", "alpha_mask", "original_size", "crop_ltrb"])
def test_one_changed_byte_of_an_npz_is_found(tmp_path, part):
    """With length and time as before, where the trainer would stop at Bad CRC-32."""
    arch = ARCHITECTURES["sd"]
    images = make_images(tmp_path / "images", SIZES, alpha=True)

    def run():
        return precompute_latents(dataset_of(images), PosteriorStub(), NpzFiles("sd"), flip=True, mask=True)

    run()
    path = npz_path(images[0], SIZES[0], arch)
    good, when = path.read_bytes(), path.stat()
    with np.load(path) as file:
        (key,) = (name for name in file if name.removesuffix(name[name.rindex("_") :]) == part)
        at = good.index(file[key].tobytes())
    for k in (0, 3, 7):
        data = bytearray(good)
        data[at + k] ^= 1 << k
        path.write_bytes(data)
        os.utime(path, ns=(when.st_atime_ns, when.st_mtime_ns))
        done = run()
        assert (done.encoded, done.current) == (1, len(SIZES) - 1)
        assert [key in reason for reason in done.reasons] == [True]
        assert path.read_bytes() == good


def test_latents_of_another_family_are_not_exported(tmp_path):
    class Sdxl(PosteriorStub):
        architecture = "sdxl"

    images = make_images(tmp_path / "images", SIZES)
    precompute_latents(dataset_of(images), Sdxl(), tmp_path / "store")
    with pytest.raises(LatentStoreError, match="VAE of sdxl"):
        export_npz(LatentStore(tmp_path / "store"), ARCHITECTURES["sd"], images_root=tmp_path / "images")
    assert not list(tmp_path.rglob("*.npz"))
    assert export_npz(LatentStore(tmp_path / "store"), ARCHITECTURES["sdxl"], images_root=tmp_path / "images").done == 3


@pytest.mark.parametrize("format", ["npz", "shards"])
@pytest.mark.parametrize("content_hash", [True, False])
def test_an_image_that_vanishes_stops_nobody_else(tmp_path, format, content_hash):
    images = make_images(tmp_path / "images", SIZES)
    dataset = dataset_of(images)
    if format == "npz":
        arch = ARCHITECTURES["sd"]
        bucket = tuple(map(int, dataset.placement.bucket_sizes[0]))
        write_npz(npz_path(images[0], SIZES[0], arch), replace(item(arch, bucket=bucket), original_size=SIZES[0]),
                  bucket, arch)  # fmt: skip
    images[0].unlink()
    output = NpzFiles("sd") if format == "npz" else tmp_path / "out"
    report = precompute_latents(dataset, PosteriorStub(), output, content_hash=content_hash)
    assert (report.encoded, [path for path, _ in report.failed]) == (2, [str(images[0])])
