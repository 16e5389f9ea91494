"""A rule as data, from which the page's own code places images."""

from __future__ import annotations

from typing import Any

from kohya_bucket.buckets import AutoBuckets, BucketRule, BucketSet, FixedBuckets, KohyaBuckets, NovelAIBuckets
from kohya_bucket.buckets.sizes import as_sizes
from kohya_bucket.buckets.switching import AspectSwitch, aspect_switch


def browser_rule(rule: BucketRule) -> dict[str, Any] | None:
    """What `templates/placement.js` needs to answer as `rule` does; None for rules it does not know.

    Thresholds are the exact doubles at which Python switches; JSON carries them unchanged.
    """
    if type(rule) is KohyaBuckets and rule.bucket_set is None:
        largest, usual = rule.no_upscale_fit == "largest", rule.usual and browser_rule(rule.usual)
        keys = {"max_area": rule.max_area, "steps": rule.reso_steps, "max_crop": rule.max_crop}
        return {"kind": "no_upscale", "largest": largest, "usual": usual, **keys}
    if type(rule) is NovelAIBuckets:
        return _novelai(rule)
    if rule.bucket_set is not None:
        if type(rule) in (KohyaBuckets, FixedBuckets, AutoBuckets):
            return _set(rule.bucket_set, rule)
        if _takes_everything(rule, rule.bucket_set):
            return _set(rule.bucket_set)
    return None


def describe_rule(rule: BucketRule) -> str:
    """A rule and its settings in one line for a reader."""
    if isinstance(rule, (KohyaBuckets, FixedBuckets)):
        cropped = "" if rule.max_crop is None else f"at most {rule.max_crop:.0%} cropped"
    if isinstance(rule, KohyaBuckets):
        width, height = rule.max_reso
        text = f"sd-scripts, {width}×{height}, sides {rule.min_size}–{rule.max_size} in steps of {rule.reso_steps}"
        if rule.no_upscale:
            text = f"sd-scripts without upscaling, up to {width}×{height} pixels, steps of {rule.reso_steps}"
        switching = "" if rule.switching == "midpoint" else f"{rule.switching} switching"
        fit = "" if rule.no_upscale_fit == "kohya" else f"{rule.no_upscale_fit} fit"
        return ", ".join(filter(None, (text, switching, fit, cropped)))
    if isinstance(rule, FixedBuckets):
        text = f"{rule.bucket_set.name or 'a given set'}, {len(rule.bucket_set)} buckets, {rule.switching} switching"
        return ", ".join(filter(None, (text, "never enlarging" * rule.no_upscale, cropped)))
    if rule.bucket_set is not None and len(rule.bucket_set) == 1:
        return f"no bucketing: everything is cropped to {rule.bucket_set[0]}"
    return repr(rule)


def _set(bucket_set: BucketSet, rule: Any = None) -> dict[str, Any]:
    """A set, with the switching and the limits of a rule, if it has them."""
    switching = getattr(rule, "switching", "midpoint")
    buckets, switch = list(bucket_set), aspect_switch(bucket_set, switching)
    return {
        "kind": "set",
        "sizes": [list(b) for b in buckets],
        "order": switch.order.tolist(),
        "thresholds": switch.thresholds.tolist(),
        "switching": switching,
        "no_upscale": getattr(rule, "no_upscale", False),
        "max_crop": getattr(rule, "max_crop", None),
        "by_area": sorted(range(len(buckets)), key=lambda k: -buckets[k].pixel_count),
        "exact_first": True,
        "aspects": None,
        "max_error": None,
    }


def _novelai(rule: NovelAIBuckets) -> dict[str, Any]:
    """Only the aspect decides, with a base size that counts as square, and far aspects are pruned."""
    out = _set(rule.bucket_set, rule)
    if rule.switching == "midpoint":
        switch = AspectSwitch.nearest(rule.aspects)
        out["order"], out["thresholds"] = switch.order.tolist(), switch.thresholds.tolist()
    return {**out, "exact_first": False, "aspects": rule.aspects.tolist(), "max_error": rule.max_ar_error}


def _takes_everything(rule: BucketRule, bucket_set: BucketSet) -> bool:
    """The rule has one bucket, and puts the longest and the smallest images there."""
    probes = as_sizes([(1, 1), (1, 100_000), (100_000, 1), (700, 500)])
    return len(bucket_set) == 1 and bool((rule.place(probes).bucket_index == 0).all())
