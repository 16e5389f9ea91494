"""Keys with a size and plain ones: each reader finds what it asks for, and nothing is encoded for their sake."""

import errno
import os
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import KohyaBucketError, UnreadableError
from kohya_bucket.latents.fingerprint import Stale, StaleReason, source_identity
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.trainers.sdscripts.families import ARCHITECTURES
from kohya_bucket.trainers.sdscripts.npz import read_write as npz
from kohya_bucket.trainers.sdscripts.npz.check import ensure_current, npz_entry
from kohya_bucket.trainers.sdscripts.npz.names import further_path
from kohya_bucket.trainers.sdscripts.npz.read_write import OpenNpz
from tests.faults import PASSING, Faults
from tests.latents.latent_helpers import PRINT, why_npz_bad
from tests.trainers.sdscripts.npz.test_npz import equal, item

SIZED = ARCHITECTURES["sdxl"]
PLAIN = SIZED.read_by("0.10.1")
KINDS = pytest.mark.parametrize("arch", [SIZED, PLAIN], ids=["sized", "plain"])
SMALL, BUCKET, LARGE = (64, 64), (128, 64), (192, 128)
BUCKETS = (SMALL, BUCKET, LARGE)


def as_sd_scripts_reads(path, bucket, arch):
    """The latents that each generation's reader takes, right or wrong; None where it finds none."""
    with np.load(path) as file:
        sized = f"latents_{bucket[1] // 8}x{bucket[0] // 8}"
        for key in (sized, "latents") if arch.multi_resolution else ("latents",):
            if key in file:
                return file[key]
    return None


def wanted(image, bucket=BUCKET, **changes):
    nbytes, mtime, _ = source_identity(image)
    fingerprint = replace(PRINT, source_bytes=nbytes, source_mtime_ns=mtime, bucket_size=bucket, **changes)
    return StoreEntry(image.name, fingerprint, (300, 150), (0.0, 0.0, 0.0, 0.0))


def write(path, image, arch, bucket=BUCKET, seed=0, note=True, **changes):
    made = item(arch, seed, bucket, flip=changes.get("flip", False), mask=False)
    fingerprint = wanted(image, bucket, **changes).fingerprint if note else None
    npz.write_npz(path, made, bucket, arch, fingerprint, source_name=image.name)
    return made


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"any")
    os.utime(path, ns=(10**18, 10**18))
    return path


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from(BUCKETS), st.booleans()), min_size=1, max_size=8))
def test_whoever_writes_at_whatever_size_no_size_is_lost(tmp_path_factory, writes):
    path = tmp_path_factory.mktemp("npz") / "a.npz"
    np.savez(path, pose=np.arange(5))
    last = {}
    for seed, (bucket, sized) in enumerate(writes):
        arch = SIZED if sized else PLAIN
        last[bucket] = item(arch, seed, bucket)
        npz.write_npz(path, last[bucket], bucket, arch, replace(PRINT, bucket_size=bucket), source_name=str(seed))
        assert np.array_equal(as_sd_scripts_reads(path, bucket, arch), last[bucket].latents)
        with OpenNpz(path) as file:
            found = npz.sizes_in(file, arch)
        assert sorted(size for size, _ in found) == sorted(last)
        for other, want in last.items():
            for reader in (SIZED, PLAIN):
                assert equal(npz.read_npz(path, other, reader), want)
    with np.load(path) as file:
        assert file["pose"].tolist() == list(range(5))


@KINDS
def test_what_another_version_wrote_is_moved_and_not_encoded(tmp_path, image, arch):
    writer = PLAIN if arch is SIZED else SIZED
    path = tmp_path / "a.npz"
    made = {bucket: write(path, image, writer, bucket, seed) for seed, bucket in enumerate(BUCKETS)}
    for bucket, want in made.items():
        reasons, _ = ensure_current(path, wanted(image, bucket), arch, image)
        assert reasons == []
        assert np.array_equal(as_sd_scripts_reads(path, bucket, arch), want.latents)
        assert ensure_current(path, wanted(image, bucket), arch, image) == ([], False)
    for bucket, want in made.items():
        assert equal(npz.read_npz(path, bucket, arch), want)
        assert npz_entry(path, wanted(image, bucket), arch, image).reasons == []


def test_plain_keys_of_the_right_shape_stay_as_they_are(tmp_path, image):
    path = tmp_path / "a.npz"
    write(path, image, PLAIN)
    before = path.read_bytes()
    assert ensure_current(path, wanted(image), SIZED, image) == ([], False)
    assert path.read_bytes() == before


@pytest.mark.parametrize("code", PASSING, ids=errno.errorcode.get)
def test_latents_of_an_image_that_cannot_be_reached_now_are_not_stale(tmp_path, image, monkeypatch, code):
    path = tmp_path / "b.npz"
    write(path, image, SIZED, note=False)
    entry, faults = wanted(image), Faults(image)
    faults.install(monkeypatch)
    with faults.at(range(1, 100), code), pytest.raises(UnreadableError, match=r"a\.png: cannot be read now"):
        npz_entry(path, entry, SIZED, image)
    image.unlink()
    assert StaleReason(Stale.GONE) in npz_entry(path, entry, SIZED, image).reasons


@pytest.mark.parametrize("note", [True, False])
def test_plain_keys_of_another_shape_are_no_answer(tmp_path, image, note):
    """Unmodified sd-scripts since 0.10.2 takes them, whatever their shape."""
    path = tmp_path / "a.npz"
    other = write(path, image, PLAIN, LARGE, note=note)
    assert as_sd_scripts_reads(path, BUCKET, SIZED).shape == SIZED.shape(LARGE)
    assert ensure_current(path, wanted(image), SIZED, image)[0] == [
        StaleReason(Stale.SHAPE, "latents", [4, 16, 24], [4, 8, 16])
    ]
    want = write(path, image, SIZED, seed=1)
    assert np.array_equal(as_sd_scripts_reads(path, BUCKET, SIZED), want.latents)
    assert np.array_equal(as_sd_scripts_reads(path, LARGE, PLAIN), other.latents)


@KINDS
@pytest.mark.parametrize("good", ["sized", "plain"])
@pytest.mark.parametrize("fault", ["flip", "vae"])
def test_of_two_kinds_that_which_serves_is_taken(tmp_path, image, arch, good, fault):
    """Another program added the other kind, of which only one has the flips, or is of this VAE."""
    path, scratch = tmp_path / "a.npz", tmp_path / "b.npz"
    good_changes, bad_changes = ({"flip": True}, {}) if fault == "flip" else ({}, {"vae": "another"})
    kinds = {"sized": SIZED, "plain": PLAIN}
    want = write(scratch, image, kinds[good], seed=1, **good_changes)
    write(path, image, kinds["plain" if good == "sized" else "sized"], seed=2, **bad_changes)
    np.savez(path, **(dict(np.load(path)) | dict(np.load(scratch))))
    entry = wanted(image, **good_changes)
    served_as_it_is = good == ("sized" if arch is SIZED else "plain")
    assert ensure_current(path, entry, arch, image) == ([], not served_as_it_is)
    assert np.array_equal(as_sd_scripts_reads(path, BUCKET, arch), want.latents)
    assert equal(npz.read_npz(path, BUCKET, arch), want)


@KINDS
@pytest.mark.parametrize("usual", [True, False])
def test_the_file_beside_is_looked_at_too(tmp_path, image, arch, usual):
    """Before 0.10.2 a second dataset's size had a file of its own; since, it is in the usual one."""
    path = tmp_path / "a_0300x0150_sdxl.npz"
    places = [path, further_path(path, BUCKET)]
    here, beside = places if usual else places[::-1]
    want = write(beside, image, PLAIN if arch is SIZED else SIZED)
    before = beside.read_bytes()
    assert ensure_current(here, wanted(image), arch, image) == ([], True)
    assert np.array_equal(as_sd_scripts_reads(here, BUCKET, arch), want.latents)
    assert beside.read_bytes() == before
    assert ensure_current(further_path(path, LARGE), wanted(image, LARGE), arch, image)[0] == [
        StaleReason(Stale.MISSING)
    ]


@KINDS
def test_what_is_stale_in_every_place_is_encoded(tmp_path, image, arch):
    path = tmp_path / "a_0300x0150_sdxl.npz"
    for where, kind in ((path, SIZED), (path, PLAIN), (further_path(path, BUCKET), PLAIN)):
        write(where, image, kind, vae="another")
    assert ensure_current(path, wanted(image), arch, image)[0] == [StaleReason(Stale.VAE, "another", "vae")]


def test_damage_that_shows_when_latents_are_moved_means_encoding(tmp_path, image):
    path = tmp_path / "a.npz"
    made = write(path, image, SIZED)
    data = path.read_bytes()
    at = data.index(made.latents.tobytes()[:64])
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (reason,) = ensure_current(path, wanted(image), PLAIN, image)[0]
    assert reason.kind is Stale.BROKEN


def test_a_damaged_array_does_not_take_the_others_with_it(tmp_path, image):
    path = tmp_path / "a.npz"
    made = [write(path, image, SIZED, bucket, seed) for seed, bucket in enumerate((SMALL, LARGE))]
    data = path.read_bytes()
    at = data.index(made[0].latents.tobytes()[:64])
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    write(path, image, SIZED, BUCKET, 2)
    assert equal(npz.read_npz(path, LARGE, SIZED), made[1])
    assert why_npz_bad(path, SMALL, SIZED) == StaleReason(Stale.MISSING)


def test_versions():
    for version in ("0.10", "0.10.1", "v0.10.1"):
        assert not SIZED.read_by(version).multi_resolution
    for version in ("", "0.10.2", "0.11", "v0.11.1", "1"):
        assert PLAIN.read_by(version or "0.11") == SIZED == SIZED.read_by(version)
    flux = ARCHITECTURES["flux"]
    assert flux.read_by("0.10.1") is flux
    no_version = "is not a version"
    for wrong, words in (("0.9.1", "needs sd-scripts 0.10.1 or newer"), ("newest", no_version), ("0.10.x", no_version)):
        with pytest.raises(KohyaBucketError, match=words):
            flux.read_by(wrong)
