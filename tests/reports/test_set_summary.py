"""Numbers for notebooks: by hand on small sets, and those of a placement on large ones."""

import math
from dataclasses import astuple

import numpy as np
import pytest

from kohya_bucket import BucketSet, FixedBuckets, load_preset, plan_epoch
from kohya_bucket.buckets import Bucket
from kohya_bucket.bucketsampler import (
    aspect_ratio_summary,
    bucket_distribution,
    crop_loss_summary,
    underutilized_buckets,
)
from kohya_bucket.reports.summary import summarize

SET = BucketSet.from_dims([(64, 64), (128, 64), (64, 128)])


def test_by_hand() -> None:
    dims = [(100, 100), (200, 100), (400, 100), (50, 100)]
    aspects = aspect_ratio_summary(dims)
    log = math.log(2)
    assert aspects.count == 4
    assert (aspects.min_ar, aspects.max_ar) == (0.5, 4.0)
    assert aspects.mean_log_ar == pytest.approx(log / 2)
    assert aspects.median_log_ar == pytest.approx(log / 2)
    assert aspects.std_log_ar == pytest.approx(log * math.sqrt(1.25))
    loss = crop_loss_summary(dims, SET)
    assert astuple(loss) == pytest.approx((4, 0.125, 0.0, 0.425, 0.5))
    assert bucket_distribution(dims, SET) == {Bucket(64, 64): 1, Bucket(128, 64): 2, Bucket(64, 128): 1}
    assert underutilized_buckets(dims, SET, min_count=2) == [Bucket(64, 64), Bucket(64, 128)]
    assert underutilized_buckets(dims, SET, min_count=0) == []


def test_they_agree_with_the_placement() -> None:
    sizes = np.random.default_rng(1).integers(64, 4000, (5000, 2))
    preset = load_preset("sdxl")
    placement = FixedBuckets(preset).place(sizes)
    assert list(bucket_distribution(sizes, preset).values()) == placement.images_per_bucket.tolist()
    counts = plan_epoch(placement.bucket_index, 4).per_bucket()
    summary, loss = summarize(sizes, placement, counts), crop_loss_summary(sizes, preset)
    assert (summary.mean_crop, summary.p95_crop, summary.worst_crop) == pytest.approx(
        (loss.mean, loss.p95, loss.max), abs=1e-3
    )


def test_nothing_gives_no_number_and_mistakes_are_named() -> None:
    assert all(math.isnan(value) for value in astuple(aspect_ratio_summary([]))[1:])
    assert all(math.isnan(value) for value in astuple(crop_loss_summary([], SET))[1:])
    assert set(bucket_distribution([], SET).values()) == {0}
    assert underutilized_buckets([], SET, min_count=1) == list(SET)
    for call in (
        lambda: aspect_ratio_summary([(0, 5)]),
        lambda: crop_loss_summary([(0, 5)], SET),
        lambda: bucket_distribution([(5, 0)], SET),
        lambda: underutilized_buckets([], SET, min_count=-1),
    ):
        with pytest.raises(ValueError, match=r"min_count is -1|0x5|5x0"):
            call()
