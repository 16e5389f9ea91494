"""Every image once, in its bucket; the next run does what is missing and nothing else."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from kohya_bucket.buckets import KohyaBuckets
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.datasets.images import BucketedDataset
from kohya_bucket.errors import KohyaBucketError, UnreadableError
from kohya_bucket.images.pixels import load_pixels
from kohya_bucket.images.resize import resize_and_crop
from kohya_bucket.images.stamps import hash_file
from kohya_bucket.latents import LatentStore, precompute_latents
from kohya_bucket.latents.dtypes import to_float32
from kohya_bucket.latents.encode.worker import shares
from kohya_bucket.latents.maintenance import check_sources
from kohya_bucket.latents.vae.encoder import noise_seed, normalize
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz.exchange import import_npz
from kohya_bucket.trainers.sdscripts.npz.files import NpzFiles
from tests.faults import Faults
from tests.latents.stub_encoders import SIZES, MeanEncoder, PosteriorStub, dataset_of, make_images


def expected(dataset, i, encoder):
    resized, bucket = (tuple(map(int, a[i])) for a in (dataset.placement.resized_sizes, dataset.placement.bucket_sizes))
    pixels = resize_and_crop(load_pixels(dataset.paths[i]), resized, bucket)
    return normalize(torch.from_numpy(pixels.copy())[None])


def test_every_image_is_encoded_as_it_is_placed(tmp_path, images):
    dataset = dataset_of(images, captions=[f"caption {i}" for i in range(len(images))])
    encoder = MeanEncoder()
    seen = []
    report = precompute_latents(
        dataset, encoder, tmp_path / "out", batch_size=3, flip=True, progress_callback=lambda *p: seen.append(p)
    )
    assert (report.encoded, report.current, report.failed) == (len(images), 0, [])
    assert seen[-1] == (len(images), len(images))
    assert seen == sorted(seen)
    store = LatentStore(tmp_path / "out")
    assert store.indexed
    assert store.damage == []
    for i, path in enumerate(images):
        (at,) = store.find([path.name])
        pixels = expected(dataset, i, encoder)
        assert np.array_equal(store.read(at), MeanEncoder().encode(pixels)[0].numpy())
        assert np.array_equal(store.read(at, flipped=True), MeanEncoder().encode(pixels.flip(3))[0].numpy())
        found = store.entry(at)
        assert found.caption == f"caption {i}"
        assert found.original_size == SIZES[i]
        assert found.fingerprint.source_bytes == path.stat().st_size
        assert store.info(at).space.values == "scaled"


@pytest.mark.parametrize("processes", [1, 2, 3, 7, 40])
def test_shares_are_whole_batches_of_about_equal_pixels(processes):
    random = np.random.default_rng(processes)
    for batches in (0, 1, 5, 200):
        batch = np.repeat(np.arange(batches), random.integers(1, 9, batches))
        pixels = random.integers(1, 1000, batches)[batch] * 4096
        owner = shares(pixels, batch, processes)
        assert ((owner >= 0) & (owner < processes)).all()
        assert len(set(zip(batch.tolist(), owner.tolist(), strict=True))) == batches
        loads = np.bincount(owner, weights=pixels, minlength=processes)
        largest = np.bincount(batch, weights=pixels).max(initial=0)
        assert loads.max() - loads.min() <= largest


def test_processes_encode_each_image_once_and_what_one_process_does(tmp_path, images):
    data = dataset_of(images * 3)
    precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "alone", batch_size=2)
    reports, encoders = [], [MeanEncoder() for _ in range(3)]
    for rank, encoder in enumerate(encoders):
        reports.append(precompute_latents(data, encoder, tmp_path / "out", batch_size=2, rank=rank, processes=3))
    assert sum(report.encoded for report in reports) == len(images)
    assert [report.encoded + report.elsewhere for report in reports] == [len(images)] * 3
    assert all(report.encoded for report in reports)
    assert [len(encoder.batches) for encoder in encoders] == [-(-report.encoded // 2) for report in reports]
    store, alone = LatentStore(tmp_path / "out"), LatentStore(tmp_path / "alone")
    assert (store.indexed, store.replaced_rows()) == (True, 0)
    assert store.strings("source") == alone.strings("source")
    assert all(np.array_equal(store.read(i), alone.read(i)) for i in range(len(alone)))
    with pytest.raises(KohyaBucketError, match="rank is 3 of 3"):
        precompute_latents(data, MeanEncoder(), tmp_path / "out", rank=3, processes=3)
    for batch_size in (0, -3, "4", 2.5):
        with pytest.raises(KohyaBucketError, match=f"batch_size is {batch_size!r}, but must be a whole number, 1"):
            precompute_latents(data, MeanEncoder(), tmp_path / "out", batch_size=batch_size)


@pytest.mark.parametrize("arch", ["sd", "flux"])
def test_processes_name_npz_as_one_process_does(tmp_path, images, arch):
    same = images[0].with_suffix(".bmp")  # shares its name with another image
    Image.open(images[0]).save(same)
    data = dataset_of([*images, same])

    class Encoder(PosteriorStub):
        latent_channels = ARCHITECTURES[arch].channels

        def posterior(self, pixels):
            mean, deviation = super().posterior(pixels)
            return mean.repeat(1, self.latent_channels // 4, 1, 1), deviation.repeat(1, self.latent_channels // 4, 1, 1)

    precompute_latents(data, Encoder(), NpzFiles(arch, tmp_path / "alone"), batch_size=2)
    for rank in range(2):
        precompute_latents(data, Encoder(), NpzFiles(arch, tmp_path / "out"), batch_size=2, rank=rank, processes=2)
    files = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert len(files) == len(images) + 1


def test_the_second_run_does_nothing(tmp_path, images):
    precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "out")
    before = sorted((tmp_path / "out").rglob("*"))
    encoder = MeanEncoder()
    report = precompute_latents(dataset_of(images), encoder, tmp_path / "out")
    assert (report.encoded, report.current, encoder.batches) == (0, len(images), [])
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_latents_by_what_imitates_a_library_are_current(tmp_path, monkeypatch):
    from kohya_bucket.latents.items import LatentItems

    images = make_images(tmp_path / "images", [(100, 90), (90, 200)])
    precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "out")
    own = LatentItems.interpolations.func
    monkeypatch.setattr(LatentItems, "interpolations", property(lambda self: own(self) + "-stub"))
    assert precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "out").encoded == 0


def test_floats_made_while_decoding_are_those_of_normalize(tmp_path):
    from concurrent.futures import ThreadPoolExecutor

    from kohya_bucket.latents.encode.worker import decode_ahead
    from kohya_bucket.latents.items import EncodeOptions, LatentItems

    every = (np.arange(64 * 64).reshape(64, 64, 1) + np.array([0, 80, 160, 240])) % 256  # each value in each channel
    images = [tmp_path / "opaque.png", tmp_path / "clear.png"]
    for image, channels in zip(images, (3, 4), strict=True):
        Image.fromarray(every[..., :channels].astype(np.uint8)).save(image)
    data = dataset_of(images)
    wanted = LatentItems.from_placement(
        [str(p) for p in images], data.sizes, data.placement, EncodeOptions("vae"), tmp_path
    )
    with ThreadPoolExecutor(1) as pool:
        (batch,) = decode_ahead(range(2), wanted, 2, pool, 1, pytest.fail, as_floats=True)
    for i, got in zip(batch.items, batch.pixels, strict=True):
        pixels = load_pixels(images[i])
        assert len(np.unique(pixels)) == 256
        assert np.array_equal(got, normalize(torch.from_numpy(pixels[None].copy()))[0].numpy())


@pytest.mark.parametrize("as_floats", [False, True])
@pytest.mark.parametrize("alpha", [False, True])
def test_batches_are_decoded_ahead_into_one_array(tmp_path, as_floats, alpha):
    from concurrent.futures import ThreadPoolExecutor

    from kohya_bucket.latents.encode.worker import decode_ahead
    from kohya_bucket.latents.items import EncodeOptions, LatentItems

    images = make_images(tmp_path / "images", [(64, 64)] * 7 + [(100, 60)] * 3, alpha=alpha)
    data = dataset_of(images)
    for broken in (1, 5, 9):
        images[broken].write_bytes(images[broken].read_bytes()[:60])
    encoding = EncodeOptions("vae", mask=alpha)
    wanted = LatentItems.from_placement(
        [str(p) for p in images], data.sizes, data.placement, encoding, tmp_path / "images"
    )
    failed = []
    with ThreadPoolExecutor(2) as pool:
        batches = list(decode_ahead(range(10), wanted, 3, pool, 1, lambda i, _: failed.append(i), as_floats=as_floats))
    assert [batch.items for batch in batches] == [[0, 2, 3], [4, 6], [7, 8]]
    assert failed == [1, 5, 9]
    for batch in batches:
        for i, pixels, mask in zip(batch.items, batch.pixels, batch.masks, strict=True):
            resized, bucket = (tuple(map(int, a[i])) for a in (data.placement.resized_sizes, wanted.bucket_sizes))
            want = resize_and_crop(load_pixels(images[i], alpha=alpha), resized, bucket)
            plain = torch.from_numpy(want[None, :, :, :3].copy())
            assert np.array_equal(pixels, normalize(plain)[0].numpy() if as_floats else plain[0].numpy())
            assert (mask is None) == (not alpha)
            if alpha:
                assert np.array_equal(mask, want[:, :, 3])


def test_a_batch_of_broken_images_has_none_to_encode(tmp_path):
    images = make_images(tmp_path / "images", [(64, 64)] * 3)
    data = dataset_of(images)
    for image in images:
        image.write_bytes(b"no image")
    encoder = MeanEncoder()
    report = precompute_latents(data, encoder, tmp_path / "out", batch_size=2)
    assert (report.encoded, len(report.failed), encoder.batches) == (0, 3, [])


def test_batches_hold_one_bucket_and_fill_up(tmp_path, images):
    encoder = MeanEncoder()
    report = precompute_latents(dataset_of(images), encoder, tmp_path / "out", batch_size=2)
    assert sum(encoder.batches) == len(images)
    assert len(encoder.batches) == sum(-(-n // 2) for _, n in report.buckets)


def run(images, out, encoder=None, area=(64, 64), **settings):
    return precompute_latents(dataset_of(images, area=area), encoder or MeanEncoder(), out, **settings)


class Other(MeanEncoder):
    fingerprint = "other weights"


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"encoder": Other()}, "weights"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"flip": True}, "flipped"),
        ({"mask": True}, "mask"),
        ({"interpolation": "nearest"}, "interpolation"),
        ({"area": (96, 96)}, "bucket"),
    ],
)
def test_one_changed_setting_encodes_exactly_the_items_it_concerns(tmp_path, images, change, reason):
    run(images, tmp_path / "out")
    report = run(images, tmp_path / "out", **change)
    concerned = len(images)
    if reason == "interpolation":  # three images are not resized, or are by a filter that is still the same
        before, after = (dataset_of(images) for _ in range(2))
        concerned = int((before.sizes != after.placement.resized_sizes).any(axis=1).sum())
    if reason == "bucket":
        before, after = dataset_of(images), dataset_of(images, area=(96, 96))
        concerned = int((before.placement.bucket_sizes != after.placement.bucket_sizes).any(axis=1).sum())
    assert report.encoded == concerned
    assert any(reason in text for text in report.reasons)
    assert run(images, tmp_path / "out", **change).encoded == 0


def test_one_edited_image_encodes_one(tmp_path, images):
    run(images, tmp_path / "out")
    make_images(tmp_path / "images", SIZES[:3], seed=9)
    for path, old in zip(images[:3], (5, 6, 7), strict=True):
        os.utime(path, ns=(old, old))
    report = run(images, tmp_path / "out")
    assert report.encoded == 3
    assert report.reasons == {"the image changed": 3}


def test_images_of_one_length_and_time_are_told_apart(tmp_path):
    """Two exchange their names, which nothing but their content shows; a third has a length of its own."""
    images = make_images(tmp_path / "images", [(64, 64)] * 3)
    for i, path in enumerate(map(Path, images)):
        path.write_bytes(path.read_bytes().ljust(20_000 + i // 2, b"\0"))
        os.utime(path, (1e9, 1e9))
    run(images, tmp_path / "out")
    assert [bool(one) for one in LatentStore(tmp_path / "out").strings("source_hash")] == [True, True, False]
    assert run(images, tmp_path / "out").encoded == 0
    first, second, kept = *map(Path, images[:2]), tmp_path / "kept"
    for source, target in ((first, kept), (second, first), (kept, second)):
        source.rename(target)
    store = LatentStore(tmp_path / "out")
    paths = [str(tmp_path / "images" / source) for source in store.strings("source")]
    assert check_sources(store, paths)[1].sum() == 2
    assert run(images, tmp_path / "out").reasons == {"the image changed": 2}
    assert run(images, tmp_path / "out").encoded == 0
    os.utime(images[2], (2e9, 2e9))
    assert run(images, tmp_path / "out").encoded == 1


def test_a_new_crop_of_an_edited_image_is_no_reason_of_its_own(tmp_path, images):
    run(images, tmp_path / "out")
    width, height = SIZES[0]
    make_images(tmp_path / "images", [(height * 2, width)], seed=9)
    assert run(images, tmp_path / "out").reasons == {"the image changed": 1}


def test_a_copied_image_is_current_where_its_hash_is_known(tmp_path, images):
    run(images, tmp_path / "out", content_hash=True)
    for path in images:
        os.utime(path, ns=(5, 5))
    assert run(images, tmp_path / "out").encoded == 0


def test_hashes_asked_for_later_are_added_without_encoding(tmp_path, images):
    run(images, tmp_path / "out")
    before = LatentStore(tmp_path / "out")
    assert set(before.strings("source_hash")) == {""}
    assert run(images, tmp_path / "out", content_hash=True).encoded == 0
    after = LatentStore(tmp_path / "out")
    assert after.strings("source_hash") == [hash_file(str(tmp_path / "images" / s)) for s in after.strings("source")]
    assert after.strings("caption") == before.strings("caption")
    for path in images:
        os.utime(path, ns=(1, 1))
    assert run(images, tmp_path / "out").encoded == 0


def test_more_flips_or_masks_than_asked_are_no_reason(tmp_path, images):
    run(images, tmp_path / "out", flip=True, mask=True)
    assert run(images, tmp_path / "out").encoded == 0


def test_a_changed_caption_encodes_nothing(tmp_path, images):
    precompute_latents(dataset_of(images, ["old"] * len(images)), MeanEncoder(), tmp_path / "out")
    report = precompute_latents(dataset_of(images, ["new"] * len(images)), MeanEncoder(), tmp_path / "out")
    assert report.encoded == 0
    assert LatentStore(tmp_path / "out").strings("caption") == ["new"] * len(images)


@pytest.mark.parametrize("more", [-1, 1])
def test_captions_are_one_for_each_image(tmp_path, images, more):
    with pytest.raises(KohyaBucketError, match=f"{len(images) + more} captions for {len(images)} images"):
        precompute_latents(dataset_of(images, ["a"] * (len(images) + more)), MeanEncoder(), tmp_path / "out")


def test_captions_stay_where_none_are_known(tmp_path, images):
    captions = [f"caption {i}" for i in range(len(images))]
    precompute_latents(dataset_of(images, captions), MeanEncoder(), tmp_path / "out")
    images[0].write_bytes(images[0].read_bytes() + b"edited")
    dataset = BucketedDataset(images, KohyaBuckets(64, 32, 128, 16))  # has no captions: each is ""
    for collection, kept in (("", captions), ("other", [None] * len(images))):
        encoded = precompute_latents(dataset, MeanEncoder(), tmp_path / "out", collection=collection).encoded
        assert encoded == (len(images) if collection else 1)
        store = LatentStore(tmp_path / "out")
        found = store.find([path.name for path in images], collection)
        assert [store.strings("caption")[i] for i in found] == kept


@pytest.mark.parametrize("caption", ["half \ud83d", 5])
def test_what_is_no_text_is_refused_before_anything_is_encoded(tmp_path, images, caption):
    with pytest.raises(KohyaBucketError, match=r"its caption is .*, but must be a text of whole characters"):
        precompute_latents(dataset_of(images[:2], ["a", caption]), MeanEncoder(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_masks_are_the_alpha_channel_and_opaque_images_have_none(tmp_path):
    clear = make_images(tmp_path / "a", [(64, 64), (100, 60)], alpha=True)
    solid = make_images(tmp_path / "b", [(64, 64)])
    dataset = dataset_of([*clear, *solid])
    precompute_latents(dataset, MeanEncoder(), tmp_path / "out", mask=True)
    store = LatentStore(tmp_path / "out")
    for i, path in enumerate(dataset.paths):
        (at,) = store.find([f"{path.parent.name}/{path.name}"])
        got = store.read_mask(at)
        if path in solid:
            assert got is None
            continue
        resized, bucket = (
            tuple(map(int, a[i])) for a in (dataset.placement.resized_sizes, dataset.placement.bucket_sizes)
        )
        assert np.array_equal(got, resize_and_crop(load_pixels(path, alpha=True), resized, bucket)[:, :, 3])


@pytest.mark.long
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_samples_do_not_depend_on_the_batch(tmp_path, images, batch_size):
    precompute_latents(dataset_of(images), PosteriorStub(), tmp_path / "out", batch_size=batch_size, flip=True)
    store = LatentStore(tmp_path / "out")
    dataset = dataset_of(images)
    for i, path in enumerate(images):
        (at,) = store.find([path.name])
        pixels = expected(dataset, i, None)
        noise = torch.Generator().manual_seed(noise_seed(0, path.name))
        for flipped in (False, True):
            mean, std = PosteriorStub().posterior(pixels.flip(3) if flipped else pixels)
            want = mean + std * torch.randn(mean.shape[1:], generator=noise)
            assert np.array_equal(store.read(at, flipped=flipped), want[0].numpy())
    assert store.info(0).space == type(store.info(0).space)(0.5, 0.25, "raw", 8, "")


def test_posterior_holds_mean_and_deviation(tmp_path, images):
    precompute_latents(dataset_of(images), PosteriorStub(), tmp_path / "out", posterior=True, dtype="bf16")
    store = LatentStore(tmp_path / "out")
    (at,) = store.find([images[2].name])
    mean, std = PosteriorStub().posterior(expected(dataset_of(images), 2, None))
    want = torch.cat([mean, std]).to(torch.bfloat16).float().numpy()
    assert np.array_equal(to_float32(store.read(at), "bfloat16"), want)
    with pytest.raises(KohyaBucketError, match="no posterior"):
        precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "other", posterior=True)


class Fragile(MeanEncoder):
    """Overflows on one image unless it computes in float32; runs out of memory beyond two images."""

    dtype = torch.float16

    def __init__(self, lost=False):
        super().__init__()
        self.wide = False
        self.lost = lost

    def encode(self, pixels):
        if len(pixels) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        out = super().encode(pixels)
        if not self.wide or self.lost:
            out[(pixels[:, 0, 0, 0] > 0.2)] = float("nan")
        return out

    def in_float32(self):
        from contextlib import contextmanager

        @contextmanager
        def widened():
            self.wide = True
            yield
            self.wide = False

        return widened()


def test_out_of_memory_and_overflow_are_survived_and_said(tmp_path):
    images = make_images(tmp_path / "images", [(64, 64)] * 9)
    report = precompute_latents(dataset_of(images), Fragile(), tmp_path / "out", batch_size=8)
    assert report.encoded == 9
    assert any("out of memory" in note and "batches of 2" in note for note in report.notes)
    assert any("float32" in note for note in report.notes)
    precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "plain", batch_size=8)
    kept, plain = LatentStore(tmp_path / "out"), LatentStore(tmp_path / "plain")
    assert all(np.array_equal(kept.read(i), plain.read(i)) for i in range(9))


def test_what_stays_not_finite_is_named_and_not_stored(tmp_path):
    images = make_images(tmp_path / "images", [(64, 64)] * 9)
    report = precompute_latents(dataset_of(images), Fragile(lost=True), tmp_path / "out")
    assert 0 < len(report.failed) < 9
    assert all("not finite" in reason for _, reason in report.failed)
    assert len(LatentStore(tmp_path / "out")) == 9 - len(report.failed)


def test_broken_and_edited_images_are_named_and_the_rest_goes_on(tmp_path, images):
    dataset = dataset_of(images)
    data = images[0].read_bytes()
    images[0].write_bytes(data[: len(data) // 2])
    make_images(tmp_path / "other", [(20, 20)])[0].replace(images[1])
    report = precompute_latents(dataset, MeanEncoder(), tmp_path / "out")
    assert sorted(Path(path).name for path, _ in report.failed) == [images[0].name, images[1].name]
    assert any("20x20" in reason and "run again" in reason for _, reason in report.failed)
    assert report.encoded == len(images) - 2


def test_an_image_without_a_bucket_is_named(tmp_path):
    images = make_images(tmp_path / "images", [(64, 64), (3, 100)])
    report = precompute_latents(dataset_of(images, no_upscale=True), MeanEncoder(), tmp_path / "out")
    assert report.encoded == 1
    ((path, reason),) = report.without_bucket
    assert Path(path).name == images[1].name
    assert reason == Reason.TOO_SMALL.text


def test_collections_of_one_store(tmp_path, images):
    run(images, tmp_path / "out", collection="a")
    report = run(images, tmp_path / "out", collection="b", area=(96, 96))
    assert report.encoded == len(images)
    assert run(images, tmp_path / "out", collection="a").encoded == 0
    assert len(LatentStore(tmp_path / "out")) == 2 * len(images)


def test_nothing_to_encode(tmp_path):
    assert precompute_latents(dataset_of([]), MeanEncoder(), tmp_path / "out").total == 0
    assert len(LatentStore(tmp_path / "out")) == 0


def test_settings_that_do_not_fit(tmp_path, images):
    for output, settings, message in [
        (NpzFiles(), {}, "--arch"),
        (NpzFiles("flux"), {}, "16 and divides by 8"),
        (NpzFiles("sd"), {"posterior": True}, "not a distribution"),
        (tmp_path / "out", {"dtype": "int8"}, "stored as"),
    ]:
        with pytest.raises(KohyaBucketError, match=message):
            run(images, output, **settings)


@pytest.mark.posix("names are Unicode there")
def test_a_name_that_is_no_text_does_not_stop_the_others(tmp_path, images):
    odd = images[0].with_name(os.fsdecode(b"caf\xe9 'a\".png"))
    try:
        images[0].rename(odd)
    except OSError:
        pytest.skip("this file system takes Unicode names only")
    paths = [odd, *images[1:]]
    report = precompute_latents(dataset_of(paths), MeanEncoder(), tmp_path / "out")
    assert report.encoded == len(images) - 1
    assert report.elsewhere == 0
    assert [path for path, _ in report.failed] == [str(odd)]
    assert "UTF-8" in report.failed[0][1]
    again = precompute_latents(dataset_of(paths), MeanEncoder(), NpzFiles("sd"))
    assert (again.encoded, again.failed) == (len(images), [])
    found = import_npz([str(p) for p in paths], tmp_path / "in", ARCHITECTURES["sd"], images_root=tmp_path / "images")
    assert (found.done, len(found.skipped)) == (len(images) - 1, 1)
    assert precompute_latents(dataset_of(paths), MeanEncoder(), NpzFiles("sd")).encoded == 0


def test_what_cannot_encode_is_refused(tmp_path: Path) -> None:
    """Such as a VAE of diffusers, which has an `encode` of its own kind and no factors."""

    class Bare:
        def encode(self, pixels: object) -> object:
            return pixels

    with pytest.raises(
        KohyaBucketError, match=r"encoder is a Bare without downsample_factor, latent_channels, scale_f"
    ):
        precompute_latents(None, Bare(), tmp_path)


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE], ids=errno.errorcode.get)
def test_a_folder_that_goes_away_ends_the_run_which_goes_on_when_it_is_back(tmp_path, images, monkeypatch, code):
    """And no image of it counts as broken."""
    faults = Faults(images[0].parent)
    faults.install(monkeypatch)

    class Leaving(MeanEncoder):
        def encode(self, pixels):
            faults.failing = range(1, 1 << 30)
            return super().encode(pixels)

    run = {"images_root": tmp_path, "batch_size": 1, "workers": 1}
    with faults.at(range(0), code), pytest.raises(UnreadableError):
        precompute_latents(dataset_of(images), Leaving(), tmp_path / "out", **run)
    kept = len(LatentStore(tmp_path / "out"))
    report = precompute_latents(dataset_of(images), MeanEncoder(), tmp_path / "out", **run)
    assert (report.encoded, report.current, report.failed) == (len(images) - kept, kept, [])
    assert 0 < kept < len(images)
