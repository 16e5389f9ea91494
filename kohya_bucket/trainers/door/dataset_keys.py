"""The keys of one dataset, as trainers name them, and the rule that they ask for."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kohya_bucket.buckets import BucketRule
from kohya_bucket.buckets.rules.fixed import OneBucket
from kohya_bucket.buckets.rules.kohya import SettingNames, check_settings
from kohya_bucket.buckets.rules.registry import rule_from_name
from kohya_bucket.buckets.sizes import IntArray, check_steps
from kohya_bucket.errors import BucketSettingsError
from kohya_bucket.trainers.door.options import AdapterOptions

_KEYS = SettingNames("min_bucket_reso", "max_bucket_reso", "bucket_reso_steps", "bucket_no_upscale")


@dataclass(frozen=True)
class DatasetKeys:
    """The bucketing keys of one dataset. `resolution` is (width, height)."""

    resolution: tuple[int, int]
    enable_bucket: bool = False
    min_bucket_reso: int = 256
    max_bucket_reso: int = 1024
    bucket_reso_steps: int = 64
    bucket_no_upscale: bool = False


def adjust_to_steps(keys: DatasetKeys, names: SettingNames = _KEYS) -> tuple[int, int]:
    """Smallest and largest side rounded to the step: down for one, up for the other.

    With upscaling, a smallest below one step is given back as it is: rounding would leave nothing to name.

    Raises:
        BucketSettingsError: none lies between them.
    """
    steps = check_steps(keys.bucket_reso_steps, names.reso_steps)
    low, high = keys.min_bucket_reso, keys.max_bucket_reso
    if low - low % steps > high + -high % steps:
        raise BucketSettingsError(
            f"{names.min_size} {low} is above {names.max_size} {high}, so that no side fits: lower the one or raise "
            "the other"
        )
    whole = low >= steps or keys.bucket_no_upscale
    return low - low % steps if whole else low, high + -high % steps


def rule_for(
    keys: DatasetKeys, options: AdapterOptions | None = None, sizes: IntArray | None = None,
    names: SettingNames = _KEYS,
) -> BucketRule:  # fmt: skip
    """Kohya's rule for these keys, or the one that the adapter's options ask for.

    `sizes` are [N, 2] of the dataset's images, for rules that make their buckets from the data; `names` are what
    messages call the keys.

    Raises:
        BucketSettingsError: keys from which no buckets follow, with the remedy.
        ConfigError: a rule, preset or file that does not exist or does not suit the dataset's step.
    """
    if not keys.enable_bucket:
        return OneBucket(keys.resolution)
    low, high = adjust_to_steps(keys, names)
    options, limits = options or AdapterOptions(), (keys.resolution, low, high, keys.bucket_reso_steps)
    width, height = keys.resolution
    if keys.bucket_no_upscale and not low <= min(width, height) <= max(width, height) <= high:
        # No-upscale mode ignores the limits, but Kohya's rule still stops over them.
        check_settings(*limits, names=names)
    if options.rule == AdapterOptions.rule:
        check_settings(*limits, keys.bucket_no_upscale, options.no_upscale_fit, names)
    rule = rule_from_name(
        options.rule,
        max_reso=keys.resolution,
        min_size=low,
        max_size=high,
        reso_steps=keys.bucket_reso_steps,
        no_upscale=keys.bucket_no_upscale,
        sizes=sizes,
        **options.of_rules(),
    )
    steps = keys.bucket_reso_steps
    if wrong := [str(bucket) for bucket in rule.bucket_set or () if not bucket.is_multiple_of(steps)]:
        raise BucketSettingsError(
            f"rule {options.rule!r} holds {', '.join(wrong[:5])}{' …' if len(wrong) > 5 else ''}, no multiple of "
            f"bucket_reso_steps {steps}: set bucket_reso_steps to a common divisor that the model can train, "
            f"or choose other buckets"
        )
    return rule


def without_effect_on(keys: DatasetKeys, options: AdapterOptions) -> str:
    """Which options of rules are set though a dataset lets them do nothing, and why, in one line; "" for none."""
    names, why = ["rule", *AdapterOptions.names()], ""
    if not keys.enable_bucket:
        why = "whose enable_bucket is off"
    elif keys.bucket_no_upscale and options.rule == AdapterOptions.rule and options.no_upscale_fit != "standard":
        names, why = ["switching"], "with bucket_no_upscale, where a bucket follows from each image's own size"
    asked = [name for name in names if why and getattr(options, name) != getattr(AdapterOptions, name)]
    return f"[kohya_bucket] {' and '.join(asked)} set, but has no effect on a dataset {why}" if asked else ""


def at_resolutions(keys: DatasetKeys, options: AdapterOptions) -> list[DatasetKeys]:
    """The dataset's keys once for each resolution that it trains at: its own, or those of `resolutions`."""
    return [replace(keys, resolution=resolution) for resolution in options.resolutions or (keys.resolution,)]
