"""Other trainers' rules; equality with their code is tested in `compat_tests/`."""

import pytest

from kohya_bucket.buckets import Reason
from kohya_bucket.buckets.trainers import (
    AIToolkitBuckets,
    DiffusersBuckets,
    DiffusionPipeBuckets,
    EveryDream2Buckets,
    MusubiTunerBuckets,
    OneTrainerBuckets,
    SimpleTunerBuckets,
)
from kohya_bucket.errors import BucketSettingsError


@pytest.mark.parametrize(
    ("rule", "image", "bucket"),
    [
        (OneTrainerBuckets(1024), (1000, 1460), "832x1280"),
        (OneTrainerBuckets(1024), (1460, 1000), "1280x832"),
        (SimpleTunerBuckets(1024), (1920, 1080), "1344x768"),
        (AIToolkitBuckets(1024), (1920, 1080), "1360x768"),
        (AIToolkitBuckets(1024), (640, 480), "640x480"),
        (DiffusionPipeBuckets(512, ar_buckets=[448 / 576, 1.0]), (600, 800), "448x576"),
        (MusubiTunerBuckets(1024), (1920, 1080), "1360x768"),
        (MusubiTunerBuckets(1024, no_upscale=True), (645, 483), "640x480"),
        (EveryDream2Buckets(512), (768, 512), "640x384"),
        (DiffusersBuckets([(512, 512), (768, 512)]), (640, 512), "768x512"),
    ],
)
def test_worked_cases(rule, image, bucket) -> None:
    assert str(rule.assign(*image)) == bucket


def test_the_last_of_equals_for_diffusers() -> None:
    # |h * bucket_w - w * bucket_h| is 0 for both.
    assert str(DiffusersBuckets([(512, 512), (1024, 1024)]).assign(700, 700)) == "1024x1024"


def test_a_side_below_the_step_has_no_bucket() -> None:
    assert MusubiTunerBuckets(512, no_upscale=True).place([(8, 300)]).reason(0) is Reason.TOO_SMALL


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(BucketSettingsError, match="kept for 512, 768, 1024, not for a resolution of 640"):
        EveryDream2Buckets(640)
    with pytest.raises(BucketSettingsError, match="quantization is 0"):
        OneTrainerBuckets(512, 0)
    with pytest.raises(BucketSettingsError, match="not a range of positive aspects"):
        DiffusionPipeBuckets(min_ar=2, max_ar=1)


def test_the_aspects_of_diffusion_pipes_example_are_the_defaults() -> None:
    aspects = [0.5, 0.63, 0.794, 1.0, 1.26, 1.587, 2.0]
    rule, given = DiffusionPipeBuckets(), DiffusionPipeBuckets(1024, ar_buckets=aspects, multiple=16)
    sizes = [(1000, 2000), (1000, 1300), (1500, 1000), (1000, 1000)]
    placed, wanted = rule.place(sizes), given.place(sizes)
    assert placed.bucket_sizes.tolist() == wanted.bucket_sizes.tolist()
    assert placed.bucket_set == wanted.bucket_set
