"""The nearest bucket as plain functions: what `FixedBuckets` decides, and errors for what has none."""

import numpy as np
import pytest

from kohya_bucket import BucketSet, FixedBuckets, load_preset
from kohya_bucket.buckets import Bucket
from kohya_bucket.buckets.geometry import aspect_loss
from kohya_bucket.bucketsampler import assign_many, assign_many_indices, best_bucket, crop_loss

SIZES = np.random.default_rng(0).integers(1, 4000, (300, 2))
SET = load_preset("sdxl")


def test_they_are_the_rule() -> None:
    rule = FixedBuckets(SET)
    index = assign_many_indices(SIZES, SET)
    assert index.tolist() == rule.assign_many_indices(SIZES).tolist()
    assert assign_many((tuple(row) for row in SIZES.tolist()), SET) == [SET[k] for k in index.tolist()]
    for (width, height), k in zip(SIZES[:20].tolist(), index.tolist(), strict=False):
        assert best_bucket(width, height, SET) == SET[k] == rule.assign(width, height)
    assert assign_many([], SET) == []
    assert assign_many_indices([], SET).shape == (0,)


def test_crop_loss_of_one_image_and_of_many() -> None:
    bucket = Bucket(1024, 512)
    assert crop_loss(2000, 1000, bucket) == 0
    assert crop_loss(1000, 1000, bucket) == crop_loss(1000, 250, bucket) == 0.5
    many = crop_loss(SIZES[:, 0], SIZES[:, 1], bucket)
    assert many.tolist() == aspect_loss(np.float64(2), SIZES[:, 0] / SIZES[:, 1]).tolist()
    assert many.tolist() == [crop_loss(int(w), int(h), bucket) for w, h in SIZES]
    # The placement's is of whole pixels: never far from it.
    placed = FixedBuckets(BucketSet((bucket,))).place(SIZES)
    assert np.abs(placed.crop_loss - many).max() < 1 / 512


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: best_bucket(0, 100, SET), "could not be read"),
        (lambda: assign_many([(0, 100)], SET), "dims holds an image of 0x100"),
        (lambda: assign_many_indices([1, 2, 3], SET), "shape"),
        (lambda: crop_loss(-1, 5, Bucket(8, 8)), "dims holds an image of -1x5"),
        (lambda: best_bucket(5, 5, [Bucket(8, 8)]), "BucketSet"),
        (lambda: assign_many_indices([(1, 2**31 - 1)], SET), "2,147,483,647"),
    ],
)
def test_errors_say_what_was_wrong(call, why) -> None:
    with pytest.raises(ValueError, match=why):
        call()


def test_a_set_says_its_area_and_its_factor() -> None:
    assert BucketSet.from_dims([(512, 512), (1024, 512), (64, 64)]).pixel_budget() == 512 * 512
    assert BucketSet.from_dims([(1, 1), (1, 2)]).pixel_budget() == 1
    assert BucketSet.from_dims([(65536, 65536)]).pixel_budget() == 1 << 32
    assert SET.all_multiples_of(64)
    assert not BucketSet.from_dims([(512, 520)]).all_multiples_of(16)
