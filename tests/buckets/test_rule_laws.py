"""Laws that every rule keeps, over random images."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import AutoBuckets, ExactBuckets, FixedBuckets, KohyaBuckets, NovelAIBuckets, load_preset
from kohya_bucket.buckets import BucketRule
from kohya_bucket.buckets.choices import TRAINERS
from kohya_bucket.buckets.rules.fixed import OneBucket
from kohya_bucket.buckets.trainers import MusubiTunerBuckets

RULES = {
    "kohya": KohyaBuckets(512),
    "kohya-no-upscale": KohyaBuckets(512, no_upscale=True),
    "kohya-area": KohyaBuckets(512, switching="area"),
    "kohya-max-crop": KohyaBuckets(512, max_crop=0.1),
    "kohya-no-upscale-max-crop": KohyaBuckets(512, no_upscale=True, max_crop=0.1),
    "kohya-largest": KohyaBuckets(512, no_upscale=True, no_upscale_fit="largest"),
    "kohya-largest-max-crop": KohyaBuckets(512, reso_steps=32, no_upscale=True, no_upscale_fit="largest", max_crop=0.1),
    "kohya-standard": KohyaBuckets(512, no_upscale=True, no_upscale_fit="standard"),
    "novelai": NovelAIBuckets(),
    "novelai-pruned": NovelAIBuckets(max_ar_error=0.2, switching="geometric", no_upscale=True),
    "exact": ExactBuckets(512),
    "exact-limits": ExactBuckets((768, 512), 32, min_side=256, max_side=1024, max_crop=0.2),
    "exact-no-upscale": ExactBuckets(512, no_upscale=True),
    "exact-as-is": ExactBuckets(1024, resize=False),
    "auto": AutoBuckets.from_dims([(640, 480), (480, 640), (1920, 1080), (512, 512)], num_buckets=3, target=512),
    "sdxl": FixedBuckets(load_preset("sdxl")),
    "sdxl-area": FixedBuckets(load_preset("sdxl"), switching="area"),
    "flux-midpoint": FixedBuckets(load_preset("flux"), switching="midpoint"),
    "flux-limits": FixedBuckets(load_preset("flux"), no_upscale=True, max_crop=0.05),
    "one": OneBucket((512, 768)),
    "musubi-no-upscale": MusubiTunerBuckets(512, no_upscale=True),
    **{name: TRAINERS[name].load()(512) for name in TRAINERS},
}
COLUMNS = ("bucket_sizes", "resized_sizes", "crop_ltrb", "aspect_errors", "crop_loss", "reasons")
# Kohya's no-upscale mode crops images within the area without scaling them, so both sides may exceed the bucket.
CROPS_BOTH_SIDES = {"kohya-no-upscale", "kohya-no-upscale-max-crop"}

side = st.one_of(st.integers(1, 4096), st.sampled_from([0, 63, 64, 512, 768, 1024, 1536, 20_000]))
size_lists = st.lists(st.tuples(side, side), min_size=1, max_size=30)
every_rule = pytest.mark.parametrize("name", RULES)


@every_rule
@given(sizes=size_lists, seed=st.integers(0, 1000))
def test_the_order_of_images_decides_nothing(name, sizes, seed) -> None:
    rule = RULES[name]
    order = np.random.default_rng(seed).permutation(len(sizes))
    here, there = rule.place(sizes), rule.place(np.array(sizes)[order])
    for column in COLUMNS:
        np.testing.assert_array_equal(getattr(here, column)[order], getattr(there, column))


@every_rule
@given(sizes=size_lists)
def test_one_image_is_the_same_as_many(name, sizes) -> None:
    rule = RULES[name]
    assert isinstance(rule, BucketRule)
    together = rule.place(sizes)
    np.testing.assert_array_equal(rule.assign_many_indices(sizes), together.bucket_index)
    for i, (width, height) in enumerate(sizes):
        alone = rule.place([(width, height)])
        for column in COLUMNS:
            np.testing.assert_array_equal(getattr(alone, column)[0], getattr(together, column)[i])
        if together.placed[i]:
            assert rule.assign(width, height) == together.bucket(i)
        else:
            assert together.bucket(i) is None
            with pytest.raises(ValueError, match=f"{width}x{height}"):
                rule.assign(width, height)


@every_rule
@given(sizes=size_lists)
def test_the_resized_image_covers_its_bucket_and_no_more_than_needed(name, sizes) -> None:
    rule = RULES[name]
    placement = rule.place(sizes)
    at = placement.placed
    buckets, resized = placement.bucket_sizes[at], placement.resized_sizes[at]
    assert (resized >= buckets).all()
    scaled, floored = (resized == buckets).any(axis=1), (resized - buckets < getattr(rule, "reso_steps", 0)).all(axis=1)
    if name == "kohya-standard":
        scaled |= floored
    assert (floored if name in CROPS_BOTH_SIDES else scaled).all()
    # Every image has a bucket of the set, or no bucket and a reason, and zeros and NaN in its row.
    assert all(placement.bucket(i) in placement.bucket_set for i in np.flatnonzero(at))
    assert (placement.reasons[~at] > 0).all()
    assert (placement.reasons[at] == 0).all()
    assert np.isnan(placement.crop_loss[~at]).all()
    assert not placement.bucket_sizes[~at].any()
    assert not placement.resized_sizes[~at].any()
