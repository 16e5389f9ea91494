"""bucketsampler's own code against the rules that carry its names here."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from kohya_bucket import AutoBuckets, BucketSet, FixedBuckets, load_preset
from kohya_bucket.buckets import bucket_set_to_toml, generate_buckets


@pytest.fixture(scope="module")
def peer():
    folder = os.environ.get("BUCKETSAMPLER_DIR")
    if not folder:
        pytest.skip("BUCKETSAMPLER_DIR is not set: no bucketsampler checkout to compare with")
    if not (Path(folder) / "bucketsampler" / "__init__.py").is_file():
        pytest.fail(f"BUCKETSAMPLER_DIR={folder} is no bucketsampler checkout")
    sys.path.insert(0, folder)
    return pytest.importorskip("bucketsampler", reason="bucketsampler's own dependencies are not installed here")


SIZES = np.random.default_rng(3).integers(64, 5000, (20_000, 2))


@pytest.mark.parametrize("name", ["sdxl", "sd15", "novelai"])
def test_nearest_buckets_are_equal(peer, name) -> None:
    theirs = peer.load_preset(name)
    ours = BucketSet.from_dims([b.as_tuple() for b in theirs])
    index = FixedBuckets(ours).assign_many_indices(SIZES)
    # An aspect as far from one bucket's as from the next is settled there by the rounding of logarithms.
    aspects = np.unique(ours.aspects)
    distances = np.sort(np.abs(np.log(SIZES[:, 0] / SIZES[:, 1])[:, None] - np.log(aspects)), axis=1)
    clear = distances[:, 1] - distances[:, 0] > 1e-12
    # An image of exactly a bucket's size takes that bucket here, there the first one of its aspect.
    exact = (SIZES[:, None] == ours.sizes).all(axis=2).any(axis=1)
    compared = clear & ~exact
    assert compared.sum() > 19_990
    np.testing.assert_array_equal(index[compared], peer.assign_many_indices(SIZES, theirs)[compared])


@pytest.mark.parametrize("name", ["sdxl", "sd15"])
def test_presets_hold_the_same_sizes(peer, name) -> None:
    assert {b.as_tuple() for b in peer.load_preset(name)} == {b.as_tuple() for b in load_preset(name)}


@pytest.mark.parametrize("k", [1, 3, 8, 12])
@pytest.mark.parametrize("seed", range(4))
def test_sets_from_the_data_are_equal(peer, k, seed) -> None:
    sides = np.random.default_rng(seed).lognormal(7, 0.4, (2000, 2)).astype(int) + 64
    ours = generate_buckets(sides, num_buckets=k, target=1024)
    theirs = peer.generate_buckets(sides, num_buckets=k, target=1024)
    assert [b.as_tuple() for b in ours.bucket_set] == [b.as_tuple() for b in theirs.bucket_set]
    np.testing.assert_allclose(ours.cluster_centers, theirs.cluster_centers, atol=1e-6)
    assert ours.crop_loss_mean == pytest.approx(theirs.crop_loss_mean, abs=1e-9)
    strategy = AutoBuckets.from_dims(sides, num_buckets=k, target=1024)
    assert strategy.bucket_set.buckets == ours.bucket_set.buckets


def test_files_are_read_by_either(peer, tmp_path) -> None:
    path = tmp_path / "set.toml"
    path.write_text(bucket_set_to_toml(load_preset("flux")), encoding="utf-8")
    theirs = peer.load_from_toml(path)
    assert [b.as_tuple() for b in theirs] == [b.as_tuple() for b in load_preset("flux")]
    assert theirs.vae_factor == 16
