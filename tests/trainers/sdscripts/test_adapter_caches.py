"""What the adapter calls: checks that name the trouble, whole files, and a store in place of npz."""

import itertools
import os
import pickle
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.fingerprint import Stale, StaleReason, source_identity, source_now
from kohya_bucket.latents.items import Caption
from kohya_bucket.trainers.sdscripts.caching.npz_cache import NpzCache
from kohya_bucket.trainers.sdscripts.caching.session import CacheItem, architecture_read_by, save_latents
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.read_write import text_marks, text_stale_reasons, write_arrays
from tests.latents.latent_helpers import stored_fingerprint

SIZE, BUCKET = (300, 150), (128, 64)
SDXL = ARCHITECTURES["sdxl"]


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "a.png"
    Image.new("RGB", SIZE).save(path)
    return path


def kinds(reasons):
    return [reason.kind for reason in reasons]


def latents(arch=SDXL, seed=0):
    return np.random.default_rng(seed).standard_normal(arch.shape(BUCKET), dtype=np.float32)


def ltrb():
    return (0.0, 0.0, 128.0, 64.0)


def cache_item(image, *args, **more):
    """Of an image as it is now."""
    return CacheItem(str(image), *args, source=source_now(image), **more)


def test_a_saved_cache_is_checked_by_everything_it_depends_on(tmp_path, image):
    path = tmp_path / "a.npz"
    item = cache_item(image, BUCKET, SIZE, flip=True, vae="v1")
    save_latents(path, item, SDXL, latents(), ltrb(), latents(seed=1))
    known, name = stored_fingerprint(path, BUCKET, SDXL)
    assert name == "a.png"
    assert (known.source_bytes, known.source_mtime_ns, "") == source_identity(image)

    def reasons(**changes):
        wanted = replace(item, path=str(path), **changes)
        return NpzCache(SDXL).stale_reasons(replace(wanted, source=source_now(wanted.image)))

    assert reasons() == reasons(vae="") == reasons(flip=False) == []
    for changes, reason in (
        ({"vae": "v2"}, StaleReason(Stale.VAE, "v1", "v2")),
        ({"alpha_mask": True}, StaleReason(Stale.PART, "alpha_mask_8x16")),
        ({"original_size": (300, 151)}, StaleReason(Stale.IMAGE_SIZE, 300, 150, 300, 151)),
        ({"bucket_reso": (64, 64)}, StaleReason(Stale.MISSING)),
    ):
        assert reasons(**changes) == [reason]
    assert kinds(reasons(interpolation="nearest")) == [Stale.INTERPOLATION]
    os.utime(image, ns=(1, 1))
    assert reasons() == [StaleReason(Stale.SOURCE, "its modification time differs")]
    other = image.rename(tmp_path / "a.jpg")
    assert reasons(image=str(other))[-1] == StaleReason(Stale.OTHER_SOURCE, "a.png")
    other.unlink()
    assert reasons(vae="") == []  # a cache outlives its image


@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_what_is_not_finite_counts_as_not_cached(tmp_path, image, arch):
    path = tmp_path / f"a{arch.suffix}"
    item = cache_item(image, BUCKET, SIZE, flip=True, alpha_mask=True, path=str(path))
    for bad, value in itertools.product(("latents", "latents_flipped", "alpha_mask"), (np.nan, np.inf, -np.inf)):
        parts = {"latents": latents(arch), "latents_flipped": latents(arch), "alpha_mask": np.ones(BUCKET[::-1], "f4")}
        save_latents(path, item, arch, parts["latents"], ltrb(), parts["latents_flipped"], parts["alpha_mask"])
        assert NpzCache(arch).stale_reasons(item) == []
        parts[bad].flat[-1] = value
        save_latents(path, item, arch, parts["latents"], ltrb(), parts["latents_flipped"], parts["alpha_mask"])
        assert NpzCache(arch).stale_reasons(item) == [StaleReason(Stale.NOT_FINITE, f"{bad}{arch.key_suffix(BUCKET)}")]


def test_outputs_of_captions_that_are_not_finite_count_as_not_cached(tmp_path):
    path = tmp_path / "a_te_outputs.npz"
    for dtype in (np.float16, np.float32, ">f4", np.float64):
        states = np.zeros((300, 5000), dtype)
        write_arrays(path, {"hidden_state1": states, "pool2": np.zeros(4), **text_marks("a cat")})
        assert text_stale_reasons(path, Caption("a cat")) == []
        states[-1, -1] = np.nan
        write_arrays(path, {"hidden_state1": states})
        assert text_stale_reasons(path, Caption("a cat")) == [StaleReason(Stale.NOT_FINITE, "hidden_state1")]


def test_every_suffix_has_its_family():
    assert len({arch.suffix for arch in ARCHITECTURES.values()}) == len(ARCHITECTURES)
    unknown = architecture_read_by(SimpleNamespace(cache_suffix="_new.npz"))
    assert (unknown.suffix, unknown.channels) == ("_new.npz", 0)


@pytest.mark.parametrize("sized", [True, False])
def test_a_reader_is_asked_for_the_keys_that_it_reads(sized):
    class Strategy:
        cache_suffix = SDXL.suffix

        def load_latents_from_disk(self, path, bucket):
            with np.load(path) as file:
                return file[f"latents{SDXL.with_sizes(sized).key_suffix(bucket)}"], [1, 2], [0, 0, 1, 1], None, None

    strategy = Strategy()
    strategy.load_latents_from_disk = None  # what stands in for it there does not count
    assert architecture_read_by(strategy) == SDXL.with_sizes(sized)
    Strategy.cache_suffix = "_flux.npz"  # all of whose keys have sizes, except for a fork's
    read = architecture_read_by(strategy)
    assert (read == ARCHITECTURES["flux"]) == sized
    assert read.key_suffix((64, 64)) == ("_8x8" if sized else "")


def test_an_npz_is_what_numpy_writes(tmp_path):
    arrays = {"a": np.arange(5), "b": np.ones((2, 3), np.float32)}
    np.savez(tmp_path / "theirs", **arrays)
    write_arrays(tmp_path / "ours.npz", arrays)
    assert (tmp_path / "ours.npz").read_bytes() == (tmp_path / "theirs.npz").read_bytes()
    with pytest.raises(LatentStoreError, match="cannot write"):
        write_arrays(tmp_path / "missing" / "a.npz", arrays)


def test_text_encoder_outputs_are_checked(tmp_path):
    path = tmp_path / "te.npz"
    assert text_stale_reasons(path) == [StaleReason(Stale.MISSING)]
    write_arrays(path, {"a": np.random.default_rng(0).random(500)} | text_marks("a cat, 猫"))
    assert text_stale_reasons(path) == []
    assert text_stale_reasons(path, Caption("a cat, 猫")) == []
    assert text_stale_reasons(path, Caption("a dog")) == [StaleReason(Stale.CAPTION)]
    data = bytearray(path.read_bytes())
    data[600] ^= 4
    path.write_bytes(data)
    assert text_stale_reasons(path) == [StaleReason(Stale.CHECKSUM, "a")]
    path.write_bytes(data[:700])
    assert kinds(text_stale_reasons(path)) == [Stale.BROKEN]


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHITECTURES.values(), ids=lambda a: a.name)
def test_a_store_in_place_of_npz(tmp_path, image, arch):
    from kohya_bucket.trainers.sdscripts.caching.shards import ShardCache

    cache = ShardCache(tmp_path / "store", tmp_path, arch)
    item = cache_item(image, BUCKET, SIZE, flip=True, alpha_mask=True, vae="v1")
    assert cache.stale_reasons(item) == [StaleReason(Stale.MISSING)]
    with pytest.raises(LatentStoreError, match="cache again"):
        cache.load(str(image), BUCKET)
    mask = np.random.default_rng(0).integers(0, 256, BUCKET[::-1]).astype(np.float32) / np.float32(255)
    cache.save(item, latents(arch), ltrb(), latents(arch, 1), mask)
    cache.finish()
    worker = pickle.loads(pickle.dumps(cache))
    plain, size, box, flipped, alpha = worker.load(str(image), BUCKET)
    assert np.array_equal(plain, latents(arch))
    assert np.array_equal(flipped, latents(arch, 1))
    assert np.array_equal(alpha, mask)
    assert (size, box) == (list(SIZE), list(ltrb()))
    again = ShardCache(tmp_path / "store", tmp_path, arch)
    assert again.stale_reasons(item) == []
    assert kinds(again.stale_reasons(cache_item(image, BUCKET, SIZE, flip=True, vae="v2"))) == [Stale.VAE]
    os.utime(image, ns=(1, 1))
    assert kinds(again.stale_reasons(replace(item, source=source_now(image)))) == [Stale.SOURCE]


def test_an_image_that_is_encoded_again_keeps_its_caption(tmp_path, image):
    from kohya_bucket.latents.store.writer import write_manifest
    from kohya_bucket.trainers.sdscripts.caching.shards import ShardCache

    cache = ShardCache(tmp_path / "store", tmp_path, SDXL)
    for vae in ("v1", "v2"):
        cache.save(cache_item(image, BUCKET, SIZE, vae=vae), latents(SDXL), ltrb())
        cache.finish()
        if vae == "v1":
            write_manifest(cache.opened(), cache.opened().with_texts(caption={0: "its caption"}))
            cache.refresh()
    assert cache.opened().strings("caption") == ["its caption"]


def test_two_resolutions_and_two_families_in_one_store(tmp_path, image):
    from kohya_bucket.latents.store.latent_store import LatentStore
    from kohya_bucket.trainers.sdscripts.caching.shards import ShardCache

    other = (64, 32)
    small = np.zeros(SDXL.shape(other), np.float32)
    # three processes, or datasets: none sees what the others write until all have written
    sizes = {"one": (BUCKET, False), "two": (other, False), "one again": (other, True)}
    caches = {
        name: ShardCache(tmp_path / "store", tmp_path, SDXL, collection=name.removesuffix(" again")) for name in sizes
    }
    items = {name: cache_item(image, size, SIZE, further=further) for name, (size, further) in sizes.items()}
    for name, cache in caches.items():
        cache.save(items[name], latents() if items[name].bucket_reso == BUCKET else small, ltrb())
    for cache in caches.values():
        cache.finish()
    cache = caches["one"]
    cache.finish()
    first, second = items["one"], items["two"]
    assert cache.stale_reasons(first) == cache.stale_reasons(second) == []
    assert len(LatentStore(tmp_path / "store")) == 3
    assert np.array_equal(cache.load(str(image), BUCKET)[0], latents())
    assert np.array_equal(cache.load(str(image), other)[0], small)
    os.utime(image, ns=(1, 1))
    first = replace(first, source=source_now(image))
    cache.save(first, latents(), ltrb())
    cache.finish()
    assert cache.stale_reasons(first) == []
    assert len(LatentStore(tmp_path / "store")) == 3
    flux = ShardCache(tmp_path / "store", tmp_path, ARCHITECTURES["flux"])
    assert flux.stale_reasons(first) == [StaleReason(Stale.MISSING)]
    flux.save(first, latents(ARCHITECTURES["flux"]), ltrb())
    flux.finish()
    cache.refresh()
    assert np.array_equal(cache.load(str(image), BUCKET)[0], latents())
    assert np.array_equal(flux.load(str(image), BUCKET)[0], latents(ARCHITECTURES["flux"]))


def test_what_precompute_stored_is_found(tmp_path):
    from kohya_bucket.latents import LatentStore, precompute_latents
    from kohya_bucket.trainers.sdscripts.caching.shards import ShardCache
    from tests.latents.stub_encoders import PosteriorStub, dataset_of, make_images

    images = make_images(tmp_path / "images", [(64, 64), (100, 60)])
    data = dataset_of(images)
    precompute_latents(data, PosteriorStub(), tmp_path / "store", collection="mine")
    cache = ShardCache(tmp_path / "store", tmp_path / "images", ARCHITECTURES["sd"])
    store = LatentStore(tmp_path / "store")
    for i, path in enumerate(images):
        bucket, resized = (tuple(map(int, a[i])) for a in (data.placement.bucket_sizes, data.placement.resized_sizes))
        size = tuple(map(int, data.sizes[i]))
        item = cache_item(path, bucket, size, resized_size=resized, vae="posterior")
        assert cache.stale_reasons(item) == []
        (at,) = store.find([path.name], "mine")
        assert np.array_equal(cache.load(str(path), bucket)[0], store.read(at))


@pytest.mark.parametrize("collections", [("", "sdxl"), ("sdxl", "")])
def test_of_two_items_for_one_image_and_size_the_newer_counts(tmp_path, image, collections):
    from kohya_bucket.latents.store.latent_store import LatentStore
    from kohya_bucket.trainers.sdscripts.caching.shards import ShardCache

    writers = [ShardCache(tmp_path / "store", tmp_path, SDXL, collection=name or "other") for name in collections]
    for writer in writers:
        writer.refresh()  # both before either has written
    for seed, (writer, changed) in enumerate(zip(writers, (1, 2), strict=True)):
        os.utime(image, ns=(changed, changed))
        writer.save(cache_item(image, BUCKET, SIZE), latents(seed=seed), ltrb())
        writer.flush()
    assert len(LatentStore(tmp_path / "store")) == 2
    cache = ShardCache(tmp_path / "store", tmp_path, SDXL)
    assert cache.stale_reasons(cache_item(image, BUCKET, SIZE)) == []
    assert np.array_equal(cache.load(str(image), BUCKET)[0], latents(seed=1))
