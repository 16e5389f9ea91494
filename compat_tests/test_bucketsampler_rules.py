"""bucketsampler's own code against the rules that carry its names here."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import kohya_bucket
import kohya_bucket.bucketsampler as here
from kohya_bucket import AutoBuckets, BucketSet, FixedBuckets, load_preset
from kohya_bucket.buckets import Bucket, bucket_set_to_toml, generate_buckets
from kohya_bucket.datasets.items import BucketResize


@pytest.fixture(scope="module")
def peer():
    """bucketsampler: of the checkout or unpacked sdist at BUCKETSAMPLER_DIR, or as it is installed."""
    folder = os.environ.get("BUCKETSAMPLER_DIR")
    if folder and not (Path(folder) / "bucketsampler" / "__init__.py").is_file():
        pytest.fail(f"BUCKETSAMPLER_DIR={folder} is not a bucketsampler checkout")
    if folder:
        sys.path.insert(0, folder)
    return pytest.importorskip("bucketsampler", reason="no bucketsampler: install it, or set BUCKETSAMPLER_DIR")


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


# One aspect occurs twice.
ODD = [(512, 512), (768, 512), (512, 768), (1024, 1024), (640, 384), (384, 640)]


def dims_for(seed: int, bucket_set: BucketSet) -> np.ndarray:
    """Random sizes without those that a logarithm's rounding decides: see the test above."""
    rng = np.random.default_rng(seed)
    sizes = np.concatenate([rng.integers(1, 9000, (3000, 2)), rng.lognormal(6.5, 0.6, (3000, 2)).astype(int) + 1])
    aspects = np.unique(bucket_set.aspects)
    distances = np.sort(np.abs(np.log(sizes[:, 0] / sizes[:, 1])[:, None] - np.log(aspects)), axis=1)
    exact = (sizes[:, None] == bucket_set.sizes).all(axis=2).any(axis=1)
    kept = sizes[(distances[:, 1] - distances[:, 0] > 1e-12) & ~exact]
    assert len(kept) > 5900
    return kept


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["sdxl", "sd15", "novelai", ""])
def test_functions_of_one_name_give_one_value(peer, name, seed) -> None:
    theirs = peer.load_preset(name) if name else peer.BucketSet.from_dims(ODD)
    ours = BucketSet.from_dims([b.as_tuple() for b in theirs])
    dims = dims_for(seed, ours)
    pairs = [tuple(row) for row in dims.tolist()]
    np.testing.assert_array_equal(here.assign_many_indices(dims, ours), peer.assign_many_indices(dims, theirs))
    assert list(map(str, here.assign_many(pairs, ours))) == list(map(str, peer.assign_many(pairs, theirs)))
    for width, height in pairs[:300]:
        assert str(here.best_bucket(width, height, ours)) == str(peer.best_bucket(width, height, theirs))
    for bucket, other in zip(ours, theirs, strict=True):
        values = here.crop_loss(dims[:200, 0], dims[:200, 1], bucket).tolist()
        assert values == [peer.crop_loss(width, height, other) for width, height in pairs[:200]]
    assert ours.pixel_budget() == theirs.pixel_budget()
    for factor in (8, 48, 64, 128):
        assert ours.all_multiples_of(factor) == theirs.all_multiples_of(factor)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["sdxl", "sd15", "novelai", ""])
def test_summaries_are_equal_to_the_last_bit(peer, name, seed) -> None:
    theirs = peer.load_preset(name) if name else peer.BucketSet.from_dims(ODD)
    ours = BucketSet.from_dims([b.as_tuple() for b in theirs])
    for dims in (dims_for(seed, ours), dims_for(seed, ours)[:7], np.array([[640, 360]])):
        assert astuple(here.aspect_ratio_summary(dims)) == astuple(peer.aspect_ratio_summary(dims))
        assert astuple(here.crop_loss_summary(dims, ours)) == astuple(peer.crop_loss_summary(dims, theirs))
        counts, other = here.bucket_distribution(dims, ours), peer.bucket_distribution(dims, theirs)
        assert [(str(b), n) for b, n in counts.items()] == [(str(b), n) for b, n in other.items()]
        for least in (0, 1, 100):
            rare = here.underutilized_buckets(dims, ours, min_count=least)
            assert list(map(str, rare)) == list(map(str, peer.underutilized_buckets(dims, theirs, min_count=least)))


def test_one_image_is_cut_to_the_same_shape(peer) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(5)
    for width, height, bucket_width, bucket_height in rng.integers(20, 200, (40, 4)).tolist():
        image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
        ours = BucketResize(Bucket(bucket_width, bucket_height), pixel_range=(0, 1))(image)
        theirs = peer.BucketResize(peer.Bucket(bucket_width, bucket_height))(image)
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
    # Where nothing is resized no filter decides, and pixels are equal.
    image = Image.fromarray(rng.integers(0, 256, (64, 97, 3), dtype=np.uint8))
    ours = BucketResize(Bucket(64, 64), pixel_range=(0, 1))(image)
    assert (ours == peer.BucketResize(peer.Bucket(64, 64))(image)).all()


def test_sizes_before_the_crop_differ_by_a_pixel_at_most(peer) -> None:
    for width, height, *bucket in np.random.default_rng(6).integers(20, 4000, (500, 4)).tolist():
        one = FixedBuckets(BucketSet.from_dims([bucket])).place([(width, height)])
        (resized, _), ours = peer.resize_to_bucket_dims(width, height, peer.Bucket(*bucket)), one.resized_sizes[0]
        assert np.abs(ours - resized).max() <= 1


def test_on_several_ranks_ours_leaves_nothing_out(peer) -> None:
    def shapes(package, drop_last: bool) -> tuple[list[list[int]], int]:
        ranks = [
            list(package.BucketBatchSampler([0] * 11, 2, drop_last=drop_last, num_replicas=3, rank=r)) for r in range(3)
        ]
        return [[len(b) for b in batches] for batches in ranks], len({i for bs in ranks for b in bs for i in b})

    pytest.importorskip("torch")
    assert shapes(kohya_bucket, False) == ([[2, 2], [2, 2], [2, 1]], 11)
    assert shapes(peer, False) == ([[2, 1], [2, 1], [2, 1]], 9)
    assert shapes(peer, True) == ([[2], [2], [2]], 6)
    assert shapes(kohya_bucket, True) == ([[2, 2], [2, 1], [2, 1]], 10)  # what does not fill a batch of one rank


def test_batches_hold_what_theirs_hold(peer) -> None:
    """The same images, each as often; which of them share a batch is drawn by other generators."""
    pytest.importorskip("torch")
    ids = np.random.default_rng(2).choice(6, 500, p=[0.4, 0.3, 0.15, 0.1, 0.04, 0.01])
    ours = kohya_bucket.BucketBatchSampler(ids, 4, drop_last=False, seed=1)
    theirs = peer.BucketBatchSampler(ids, 4, drop_last=False, seed=1)
    assert len(ours) == len(theirs)
    for batches in (list(ours), list(theirs)):
        assert sorted(i for batch in batches for i in batch) == list(range(500))
        assert all(len(set(ids[batch])) == 1 for batch in batches)
    np.testing.assert_array_equal(ours.bucket_indices, theirs.bucket_indices)


_IN_ITS_PLACE = """
import importlib, sys, types
import kohya_bucket.bucketsampler as here
from kohya_bucket import cli

class Named(types.ModuleType):
    # A name that is private there is a function that fails, so that the other tests of its file run.
    def __getattr__(self, name):
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        for place in (here, cli):
            try:
                return getattr(place, name)
            except AttributeError:
                pass
        return lambda *_, **__: (_ for _ in ()).throw(NotImplementedError(name))

for name in {names!r}:
    sys.modules[name] = module = Named(name)
    module.__path__ = []
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
"""


def test_as_many_of_its_own_tests_pass_as_the_page_says(tmp_path) -> None:
    folder = Path(os.environ.get("BUCKETSAMPLER_DIR", ""))
    if not (folder / "tests" / "test_public_api.py").is_file():
        pytest.skip("BUCKETSAMPLER_DIR is not an unpacked sdist of bucketsampler 0.1.0a3")
    names = sorted(
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")
        for path in (folder / "bucketsampler").rglob("*.py")
    )
    shutil.copytree(folder / "tests", tmp_path / "tests")
    (tmp_path / "conftest.py").write_text(_IN_ITS_PLACE.format(names=names), encoding="utf-8")
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": str(root)},
    )  # fmt: skip
    found = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?)", done.stdout)}
    page = (root / "docs" / "coming-from.md").read_text(encoding="utf-8")
    count, passed = re.search(r"Of the (\d+) tests .*?, (\d+) pass", page).groups()
    assert (found["passed"], sum(found.values())) == (int(passed), int(count)), done.stdout[-5000:]
