"""A given set: the nearest bucket, and the opt-in limits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import BucketSet, FixedBuckets, KohyaBucketError, load_preset
from kohya_bucket.buckets import Bucket, Reason
from kohya_bucket.errors import BucketSettingsError

sides = st.integers(1, 8192)
size_lists = st.lists(st.tuples(sides, sides), min_size=1, max_size=40)
units = st.integers(1, 32)
bucket_sets = st.lists(st.tuples(units, units), min_size=1, max_size=12, unique=True).map(
    lambda dims: BucketSet.from_dims([(w * 64, h * 64) for w, h in dims])
)


def test_the_page_example() -> None:
    strategy = FixedBuckets(BucketSet.from_dims([(512, 512), (768, 512), (512, 768)]))
    assert strategy.assign(1024, 768) == Bucket(768, 512)
    assert strategy.assign_many_indices([(100, 100), (300, 200), (1, 5)]).tolist() == [0, 1, 2]


@given(bucket_sets, size_lists)
def test_geometric_is_the_least_log_distance(bucket_set, sizes) -> None:
    indices = FixedBuckets(bucket_set).assign_many_indices(sizes)
    buckets = np.log(bucket_set.aspects)
    for (width, height), index in zip(sizes, indices, strict=True):
        distances = np.abs(buckets - np.log(width / height))
        assert distances[index] <= distances.min() + 1e-12


@given(bucket_sets, size_lists)
def test_midpoint_is_the_least_distance_and_the_first_of_equals(bucket_set, sizes) -> None:
    indices = FixedBuckets(bucket_set, switching="midpoint").assign_many_indices(sizes)
    exact = {bucket.as_tuple(): k for k, bucket in enumerate(bucket_set)}
    for size, index in zip(sizes, indices, strict=True):
        assert index == exact.get(size, np.abs(bucket_set.aspects - size[0] / size[1]).argmin())


@given(bucket_sets, st.sampled_from(["midpoint", "geometric", "area"]))
def test_an_image_of_a_buckets_size_takes_that_bucket(bucket_set, switching) -> None:
    rule = FixedBuckets(bucket_set, switching=switching)
    assert rule.assign_many_indices(bucket_set.sizes).tolist() == list(range(len(bucket_set)))


@given(bucket_sets, size_lists, st.floats(0, 0.5))
def test_the_bound_on_crop_holds_and_gives_up_only_where_every_bucket_breaks_it(bucket_set, sizes, bound) -> None:
    free, bounded = FixedBuckets(bucket_set).place(sizes), FixedBuckets(bucket_set, max_crop=bound).place(sizes)
    assert (bounded.crop_loss[bounded.placed] <= bound).all()
    kept = free.crop_loss <= bound
    np.testing.assert_array_equal(free.bucket_index[kept], bounded.bucket_index[kept])
    for i in np.flatnonzero(~bounded.placed):
        assert bounded.reason(i) is Reason.CROP_LIMIT
        for bucket in bucket_set:
            assert FixedBuckets(BucketSet((bucket,))).place([sizes[i]]).crop_loss[0] > bound


@given(bucket_sets, size_lists)
def test_without_upscaling_no_image_grows(bucket_set, sizes) -> None:
    array = np.array(sizes)
    placement = FixedBuckets(bucket_set, no_upscale=True).place(sizes)
    at = placement.placed
    assert (placement.bucket_sizes[at] <= array[at]).all()
    assert (placement.resized_sizes[at] <= array[at]).all()
    for i in np.flatnonzero(~at):
        assert placement.reason(i) is Reason.NO_SMALLER_BUCKET
        assert not (bucket_set.sizes <= array[i]).all(axis=1).any()


def test_an_image_too_small_for_every_bucket_is_named() -> None:
    with pytest.raises(ValueError, match="800x800 has no bucket: every bucket of the set is larger"):
        FixedBuckets(load_preset("sdxl"), no_upscale=True).assign(800, 800)


@pytest.mark.parametrize("bound", [-0.1, 1, float("nan")])
def test_a_bound_that_is_no_share_is_refused(bound) -> None:
    with pytest.raises(BucketSettingsError, match=r"max_crop is .* at least 0 and below 1"):
        FixedBuckets(load_preset("sdxl"), max_crop=bound)


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(BucketSettingsError, match=r"switching is 'mean', .* midpoint, geometric, area"):
        FixedBuckets(load_preset("sdxl"), switching="mean")


@pytest.mark.parametrize("sizes", [[(99999999999, 1)], [(10**22, 1)], [(1.5, 2)], [("a", "b")], [1, 2, 3]])
def test_sizes_that_are_none_are_refused(sizes) -> None:
    with pytest.raises(KohyaBucketError, match="sizes must"):
        FixedBuckets(load_preset("sdxl")).place(sizes)
