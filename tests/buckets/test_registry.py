"""Rules by the names that config files use."""

import re

import numpy as np
import pytest

from kohya_bucket import AutoBuckets, BucketSet, ConfigError, ExactBuckets, FixedBuckets, KohyaBuckets, NovelAIBuckets
from kohya_bucket.buckets import bucket_set_to_toml, load_preset, rule_from_name
from kohya_bucket.errors import BucketSettingsError, InvalidBucketError

SIZES = [(640, 480), (1920, 1080), (0, 0), (512, 512)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("kohya", KohyaBuckets), ("novelai", NovelAIBuckets), ("exact", ExactBuckets), ("auto", AutoBuckets),
     ("preset:sdxl", FixedBuckets)],
)  # fmt: skip
def test_every_name_places(name, kind) -> None:
    rule = rule_from_name(name, max_reso=(768, 512), sizes=SIZES)
    assert type(rule) is kind
    assert rule.place(SIZES).placed.tolist() == [True, True, False, True]
    bounded = rule_from_name(name, max_reso=512, sizes=SIZES, no_upscale=True, max_crop=0.3)
    placement = bounded.place([(2000, 1400), (100, 60)])
    assert (placement.bucket_sizes <= [(2000, 1400), (100, 60)]).all()


def test_files(tmp_path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(bucket_set_to_toml(load_preset("sd3")), encoding="utf-8")
    rule = rule_from_name(f"file:{path}", max_reso=512, switching="area")
    assert rule.bucket_set == load_preset("sd3")
    assert rule.switching == "area"


def test_the_settings_reach_the_rule() -> None:
    rule = rule_from_name("kohya", max_reso=1024, reso_steps=32, no_upscale=True, no_upscale_fit="largest")
    assert (rule.reso_steps, rule.no_upscale_fit, rule.switching) == (32, "largest", "midpoint")
    assert rule_from_name("preset:sdxl", max_reso=512).switching == "geometric"
    assert rule_from_name("exact", max_reso=512, min_size=128, max_size=512).max_side == 512
    assert rule_from_name("novelai", max_reso=(768, 512), min_size=256).base_res == (576, 576)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("koya", {}, ConfigError, "rule is 'koya', but must be one of kohya, novelai, .*; the nearest is 'kohya'"),
        ("preset:", {}, ConfigError, "rule is 'preset:'"),
        ("preset:sdx", {}, ConfigError, "preset is 'sdx'.*'sdxl'"),
        ("auto", {}, BucketSettingsError, "no sizes were given"),
        ("exact", {"switching": "area"}, BucketSettingsError, "which only the rules kohya, novelai, "),
        ("novelai", {"no_upscale_fit": "largest"}, BucketSettingsError, "only the rule kohya"),
        ("kohya", {"switching": "middle"}, BucketSettingsError, "'middle'"),
        ("kohya", {"switching": "middle", "no_upscale": True}, BucketSettingsError, "'middle'"),
    ],
)
def test_what_does_not_exist_is_named(name, options, error, message) -> None:
    with pytest.raises(error, match=message):
        rule_from_name(name, max_reso=512, **options)


def test_a_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        rule_from_name(f"file:{tmp_path / 'none.toml'}", max_reso=512)


@pytest.mark.parametrize("rule", [KohyaBuckets, NovelAIBuckets, ExactBuckets])
@pytest.mark.parametrize("value", ["512", ("512", "512"), 512.5, (512.5, 512), None, (512,), (512, 512, 512)])
def test_resolutions_that_are_none_are_refused(rule, value) -> None:
    with pytest.raises(BucketSettingsError, match=re.escape(repr(value))):
        rule(value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert KohyaBuckets(np.int64(512)).bucket_set == KohyaBuckets(512).bucket_set
    assert rule_from_name("kohya", max_reso=np.int32(512)).bucket_set == KohyaBuckets(512).bucket_set
    assert AutoBuckets.from_dims([(512, 512)], target=np.int64(512)).bucket_set.sizes.tolist() == [[512, 512]]
    with pytest.raises(BucketSettingsError, match=r"reso_steps is 1\.5, but must be a whole number"):
        KohyaBuckets(512, reso_steps=1.5)


@pytest.mark.parametrize("given", ["sdxl", [(512, 512)], None])
def test_what_is_no_bucket_set_is_refused(given) -> None:
    with pytest.raises(BucketSettingsError, match=r"must be a BucketSet: load_preset\('sdxl'\)"):
        FixedBuckets(given)


@pytest.mark.parametrize("dims", [[(512,)], [(512, 512, 3)], [(512.7, 512)], [(2**31, 512)]])
def test_what_is_no_bucket_is_refused(dims) -> None:
    with pytest.raises(InvalidBucketError):
        BucketSet.from_dims(dims)
