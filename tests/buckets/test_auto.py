"""Sets made from the data."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import AutoBuckets
from kohya_bucket.buckets import Bucket, generate_buckets
from kohya_bucket.buckets.optimal_set import admissible_sizes, least_crop_set
from kohya_bucket.buckets.rules.auto import kmeans_1d
from kohya_bucket.errors import BucketSettingsError

aspect_lists = st.lists(st.floats(0.2, 5), min_size=1, max_size=20)


def total_loss(aspects, sizes) -> float:
    buckets = np.array(sizes)[:, 0] / np.array(sizes)[:, 1]
    shares = buckets[:, None] / np.array(aspects)
    return (1 - np.minimum(shares, 1 / shares)).min(axis=0).sum()


@given(aspect_lists, st.integers(2, 14), st.integers(1, 3))
def test_no_other_set_crops_less(aspects, units, k) -> None:
    every_size = [(w * 64, h * 64) for w in range(1, units + 1) for h in range(1, units // w + 1)]
    candidates = admissible_sizes(units * 64 * 64, 64)
    chosen, loss = least_crop_set(np.array(aspects), candidates, k)
    assert len(chosen) <= k
    assert {tuple(c) for c in chosen.tolist()} <= set(every_size)
    assert math.isclose(loss, total_loss(aspects, chosen), abs_tol=1e-9)
    best = min(total_loss(aspects, c) for c in itertools.combinations(every_size, min(k, len(every_size))))
    assert loss <= best + 1e-9


@given(st.integers(1, 400), st.floats(0, 0.95))
def test_candidates_are_the_largest_size_of_each_aspect(units, min_fill) -> None:
    candidates = admissible_sizes(units * 64, 8, min_fill)
    sizes = [(w, h) for w in range(1, units + 1) for h in range(1, units // w + 1) if w * h >= min_fill * units]
    largest: dict[tuple[int, int], tuple[int, int]] = {}
    for w, h in sorted(sizes):
        largest[w // math.gcd(w, h), h // math.gcd(w, h)] = (w * 8, h * 8)
    assert sorted(map(tuple, candidates.tolist())) == sorted(largest.values())
    assert (np.diff(candidates[:, 0] / candidates[:, 1]) > 0).all()


def test_the_optimum_holds_at_real_scale_against_exchanges() -> None:
    rng = np.random.default_rng(0)
    aspects = np.exp(rng.normal(0, 0.4, 3000))
    candidates = admissible_sizes(1024 * 1024, 64, 0.85)
    chosen, loss = least_crop_set(aspects, candidates, 6)
    for position in range(len(chosen)):
        for other in candidates[::3]:
            changed = chosen.copy()
            changed[position] = other
            assert total_loss(aspects, changed) >= loss - 1e-9


def test_the_page_example() -> None:
    dims = np.array([[1024, 1024], [2048, 1024], [1024, 2048]] * 50)
    strategy = AutoBuckets.from_dims(dims, num_buckets=3, target=1024)
    assert [str(b) for b in strategy.bucket_set] == ["704x1472", "1024x1024", "1472x704"]
    assert strategy.result.cluster_sizes == (50, 50, 50)
    assert isinstance(strategy.assign(1500, 1500), Bucket)


dims_lists = st.lists(st.tuples(st.integers(64, 4096), st.integers(64, 4096)), min_size=1, max_size=60)


@given(dims_lists, st.integers(1, 10), st.sampled_from(["kmeans", "optimal"]), st.integers(0, 99))
def test_the_result_is_deterministic_and_describes_itself(dims, k, method, seed) -> None:
    result = generate_buckets(dims, num_buckets=k, target=512, method=method, seed=3)
    shuffled = np.random.default_rng(seed).permutation(np.array(dims))
    again = generate_buckets(shuffled, num_buckets=k, target=512, method=method, seed=3)
    assert again.bucket_set == result.bucket_set
    assert 1 <= len(result.bucket_set) <= k
    assert sum(result.cluster_sizes) == len(dims)
    assert len(result.cluster_sizes) == len(result.cluster_centers) == len(result.bucket_set)
    assert result.bucket_set.vae_factor == 64
    losses = total_loss([w / h for w, h in dims], result.bucket_set.sizes)
    assert math.isclose(result.crop_loss_mean, losses / len(dims), abs_tol=1e-9)


@given(dims_lists, st.integers(1, 6))
def test_optimal_is_never_worse_than_kmeans_within_the_area(dims, k) -> None:
    kmeans = generate_buckets(dims, num_buckets=k, target=512)
    optimal = generate_buckets(dims, num_buckets=k, target=512, method="optimal")
    assert all(b.pixel_count <= 512 * 512 for b in optimal.bucket_set)
    if all(b.pixel_count <= 512 * 512 for b in kmeans.bucket_set):
        assert optimal.crop_loss_mean <= kmeans.crop_loss_mean + 1e-9


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=60), st.integers(1, 8))
def test_kmeans_ends_with_each_centre_the_mean_of_its_values(values, k) -> None:
    array = np.array(values)
    centres, counts, iterations = kmeans_1d(array, k)
    assert counts.sum() == len(values)
    assert 1 <= iterations <= 100
    assert (np.diff(centres) > 0).all()
    if iterations < 100:
        nearest = np.abs(array[:, None] - centres).argmin(axis=1)
        for j, centre in enumerate(centres):
            mine = array[nearest == j]
            assert counts[j] != len(mine) or not len(mine) or abs(mine.mean() - centre) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_buckets": 0}, "num_buckets is 0"),
        ({"target": 0}, "target is 0"),
        ({"vae_factor": 0}, "vae_factor is 0"),
        ({"method": "best"}, "method is 'best'"),
        ({"target": 32}, "smaller than one square of 64"),
        ({"min_side": 1000, "max_side": 1010}, "no multiple of 64 lies within"),
        ({"method": "optimal", "min_fill": 1.5}, "lower min_fill"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message) -> None:
    with pytest.raises(BucketSettingsError, match=message):
        generate_buckets([(512, 512)], **options)


def test_unreadable_or_no_images_are_refused() -> None:
    with pytest.raises(BucketSettingsError, match="no image can be read"):
        generate_buckets([])
    with pytest.raises(BucketSettingsError, match="an image of 0x5"):
        generate_buckets([(64, 64), (0, 5)])


@pytest.mark.parametrize("method", ["kmeans", "optimal"])
def test_a_strip_gets_a_bucket_of_whole_steps_whatever_the_target(method) -> None:
    made = generate_buckets([(100_000, 100), (100, 100)], num_buckets=2, target=1000, vae_factor=64, method=method)
    assert made.bucket_set[-1] == Bucket(15_616, 64)
