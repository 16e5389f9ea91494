"""A rule as data from which the report's script can repeat the placement exactly."""

from __future__ import annotations

from typing import Any

from kohya_bucket.buckets import AutoBuckets, BucketRule, BucketSet, FixedBuckets, KohyaBuckets, NovelAIBuckets
from kohya_bucket.buckets.sizes import as_sizes
from kohya_bucket.buckets.switching import AspectSwitch, aspect_switch

__all__ = ["browser_rule", "describe_rule"]


def browser_rule(rule: BucketRule) -> dict[str, Any] | None:
    """What `templates/placement.js` needs to answer as `rule` does; None for rules it does not know.

    Thresholds are the exact doubles at which Python switches; JSON carries them unchanged.
    """
    if type(rule) is KohyaBuckets:
        if rule.bucket_set is not None:
            return _set(rule.bucket_set, rule.switching, max_crop=rule.max_crop)
        largest = rule.no_upscale_fit == "largest"
        keys = {"max_area": rule.max_area, "steps": rule.reso_steps, "max_crop": rule.max_crop}
        return {"kind": "no_upscale", "largest": largest, **keys}
    if type(rule) in (FixedBuckets, AutoBuckets):
        assert isinstance(rule, FixedBuckets)
        return _set(rule.bucket_set, rule.switching, no_upscale=rule.no_upscale, max_crop=rule.max_crop)
    if type(rule) is NovelAIBuckets:
        return _novelai(rule)
    if rule.bucket_set is not None and _takes_everything(rule, rule.bucket_set):
        return _set(rule.bucket_set, "midpoint")
    return None


def describe_rule(rule: BucketRule) -> str:
    """The rule in words, for a heading."""
    extras = []
    if isinstance(rule, KohyaBuckets):
        width, height = rule.max_reso
        if rule.switching != "midpoint":
            extras.append(f"{rule.switching} switching")
        if rule.no_upscale_fit != "kohya":
            extras.append(f"{rule.no_upscale_fit} fit")
        if rule.max_crop is not None:
            extras.append(f"at most {rule.max_crop:.0%} cropped")
        if rule.no_upscale:
            text = f"sd-scripts without upscaling, up to {width}×{height} pixels, steps of {rule.reso_steps}"
        else:
            text = f"sd-scripts, {width}×{height}, sides {rule.min_size}–{rule.max_size} in steps of {rule.reso_steps}"
        return ", ".join([text, *extras])
    if isinstance(rule, FixedBuckets):
        extras.append(f"{rule.switching} switching")
        if rule.no_upscale:
            extras.append("never enlarging")
        if rule.max_crop is not None:
            extras.append(f"at most {rule.max_crop:.0%} cropped")
        return f"{rule.bucket_set.name or 'a given set'}, {len(rule.bucket_set)} buckets, {', '.join(extras)}"
    if rule.bucket_set is not None and len(rule.bucket_set) == 1:
        return f"no bucketing: everything is cropped to {rule.bucket_set[0]}"
    return repr(rule)


def _set(
    bucket_set: BucketSet, switching: str, no_upscale: bool = False, max_crop: float | None = None
) -> dict[str, Any]:
    buckets, switch = list(bucket_set), aspect_switch(bucket_set, switching)
    return {
        "kind": "set",
        "sizes": [list(b) for b in buckets],
        "order": switch.order.tolist(),
        "thresholds": switch.thresholds.tolist(),
        "switching": switching,
        "no_upscale": no_upscale,
        "max_crop": max_crop,
        "by_area": sorted(range(len(buckets)), key=lambda k: -buckets[k].pixel_count),
        "exact_first": True,
        "aspects": None,
        "max_error": None,
    }


def _novelai(rule: NovelAIBuckets) -> dict[str, Any]:
    """Only the aspect decides, with a base size that counts as square, and far aspects are pruned."""
    out = _set(rule.bucket_set, rule.switching, no_upscale=rule.no_upscale, max_crop=rule.max_crop)
    if rule.switching == "midpoint":
        switch = AspectSwitch.nearest(rule.aspects)
        out["order"], out["thresholds"] = switch.order.tolist(), switch.thresholds.tolist()
    return {**out, "exact_first": False, "aspects": rule.aspects.tolist(), "max_error": rule.max_ar_error}


def _takes_everything(rule: BucketRule, bucket_set: BucketSet) -> bool:
    """The rule has one bucket, and puts the longest and the smallest images there."""
    probes = as_sizes([(1, 1), (1, 100_000), (100_000, 1), (700, 500)])
    return len(bucket_set) == 1 and bool((rule.place(probes).bucket_index == 0).all())
