"""Which setting to change, and what it would gain: every number comes from placing the same images again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kohya_bucket.buckets import (
    AutoBuckets,
    BucketRule,
    BucketSet,
    FixedBuckets,
    KohyaBuckets,
    list_presets,
    load_preset,
)
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.reports.analysis import Analysis
from kohya_bucket.reports.recommend_files import about_files
from kohya_bucket.reports.recommendation import Recommendation
from kohya_bucket.reports.summary import Summary, summarize
from kohya_bucket.reports.worth import differences, worth

__all__ = ["Recommendation", "recommend"]

_ENLARGED_GOAL = 0.05


@dataclass(frozen=True)
class _Change:
    setting: str
    current: str
    proposed: str
    why: str
    rule: BucketRule
    batch_size: int | None = None


def recommend(analysis: Analysis) -> list[Recommendation]:
    """Changes that are worth it for these images, the most effective first.

    A change is listed when it lowers the mean or the 95th percentile of crop loss, the share of enlarged images,
    of short batches or of images without a bucket, or trains more pixels, by a margin that matters, and by more
    than it costs elsewhere.
    """
    if not analysis.summary.placed and not len(analysis.unplaced):
        return []
    found = []
    for change in _changes(analysis):
        after = _summary(analysis, change.rule, change.batch_size)
        weight = worth(analysis.summary, after)
        if weight > 0:
            gain, cost = differences(analysis.summary, after)
            text = (change.setting, change.current, change.proposed, change.why, gain, cost)
            found.append((weight, Recommendation(*text, analysis.summary, after)))
    found.sort(key=lambda pair: -pair[0])
    best: dict[str, Recommendation] = {}
    for _, recommendation in found:
        best.setdefault(recommendation.setting, recommendation)
    return [*best.values(), *about_files(analysis)]


def _changes(analysis: Analysis) -> Iterator[_Change]:
    rule = analysis.subject.rule
    if isinstance(rule, KohyaBuckets):
        yield from _smaller_steps(rule)
        yield from (_upscaling(rule) if rule.no_upscale else _limits(rule))
        yield from _lower_resolution(analysis, rule)
        if not rule.no_upscale and rule.switching != "geometric":
            why = "The middle between two aspects is not where both buckets crop the same share"
            yield from _tried("[kohya_bucket] switching", rule.switching, "geometric", why, rule, switching="geometric")
    elif isinstance(rule, FixedBuckets):
        yield from _other_presets(rule)
        if rule.switching != "geometric":
            why = "Geometric switching is the one that crops least"
            changed = _fixed(rule, rule.bucket_set, "geometric")
            yield _Change("[kohya_bucket] switching", rule.switching, "geometric", why, changed)
    yield from _smaller_batches(analysis)


def _smaller_steps(rule: KohyaBuckets) -> Iterator[_Change]:
    """Half the step, but not below 32, which the U-Nets of SD and SDXL need, unless it is below already."""
    steps = rule.reso_steps // 2
    if rule.reso_steps % 16 == 0 and (steps >= 32 or rule.reso_steps <= 32):
        why = f"Buckets in steps of {rule.reso_steps} leave wide gaps between their aspects"
        yield from _tried("bucket_reso_steps", str(rule.reso_steps), str(steps), why, rule, reso_steps=steps)


def _limits(rule: KohyaBuckets) -> Iterator[_Change]:
    steps = rule.reso_steps
    longest = rule.max_area // rule.min_size // steps * steps
    if longest > rule.max_size:
        why = f"No bucket is longer than {rule.max_size}, so long images are cropped to a shorter aspect"
        yield from _tried("max_bucket_reso", str(rule.max_size), str(longest), why, rule, max_size=longest)
    lower = max(steps, rule.min_size // 2 // steps * steps)
    if lower < rule.min_size:
        why = f"No bucket is narrower than {rule.min_size}, so long images are cropped to a shorter aspect"
        yield from _tried("min_bucket_reso", str(rule.min_size), str(lower), why, rule, min_size=lower)
        reach = max(rule.max_size, rule.max_area // lower // steps * steps)
        if reach != rule.max_size:
            now, then = f"{rule.min_size} and {rule.max_size}", f"{lower} and {reach}"
            both = "min_bucket_reso and max_bucket_reso"
            yield from _tried(both, now, then, why, rule, min_size=lower, max_size=reach)
    why = "Images smaller than their bucket are scaled up, which trains blur"
    yield from _tried("bucket_no_upscale", "false", "true", why, rule, no_upscale=True, switching="midpoint")


def _upscaling(rule: KohyaBuckets) -> Iterator[_Change]:
    if rule.no_upscale_fit != "largest":
        why = "sd-scripts floors one side, follows with the other and floors again, where a larger size often fits"
        yield from _tried(
            "[kohya_bucket] no_upscale_fit", rule.no_upscale_fit, "largest", why, rule, no_upscale_fit="largest"
        )
    why = "Without upscaling, every size that occurs becomes a bucket of its own"
    setting, now, then = "bucket_no_upscale", "true", "false"
    if rule.no_upscale_fit != "kohya":  # refused with upscaling
        setting, now, then = (
            f"{setting} and [kohya_bucket] no_upscale_fit",
            f"{now} and {rule.no_upscale_fit}",
            (f"{then} and none"),
        )
    yield from _tried(setting, now, then, why, rule, no_upscale=False, no_upscale_fit="kohya")


def _tried(
    setting: str, current: str, proposed: str, why: str, rule: KohyaBuckets, **changes: object
) -> Iterator[_Change]:
    changed = _kohya(rule, **changes)
    if changed is not None:
        yield _Change(setting, current, proposed, why, changed)


def _lower_resolution(analysis: Analysis, rule: KohyaBuckets) -> Iterator[_Change]:
    """The highest square resolution at which few images are enlarged."""
    if rule.no_upscale or analysis.summary.enlarged <= 0.2:
        return
    steps = rule.reso_steps
    side = int(math.sqrt(rule.max_area)) // steps * steps
    low = max(steps, rule.min_size)
    for resolution in range(side - steps, max(low, side // 2) - 1, -steps):
        changed = _kohya(rule, max_reso=(resolution, resolution))
        if changed is not None and _summary(analysis, changed).enlarged <= _ENLARGED_GOAL:
            why = "Most images hold fewer pixels than the resolution asks for"
            yield _Change("resolution", f"{rule.max_reso[0]},{rule.max_reso[1]}", str(resolution), why, changed)
            return


def _other_presets(rule: FixedBuckets) -> Iterator[_Change]:
    """Presets of about the same area."""
    area = float(np.median([b.pixel_count for b in rule.bucket_set]))
    for name in list_presets():
        bucket_set = load_preset(name)
        other = float(np.median([b.pixel_count for b in bucket_set]))
        if bucket_set.buckets != rule.bucket_set.buckets and 0.8 < other / area < 1.25:
            proposed = _fixed(rule, bucket_set, rule.switching)
            why = f"Preset {name} has {len(bucket_set)} buckets instead of {len(rule.bucket_set)}"
            yield _Change("[kohya_bucket] rule", _name_of(rule), f"preset:{name}", why, proposed)


def _name_of(rule: FixedBuckets) -> str:
    """The rule as `rule_from_name` knows it, or its set's name."""
    if isinstance(rule, AutoBuckets):
        return "auto"
    name = rule.bucket_set.name
    return f"preset:{name}" if name in list_presets() else name or "own set"


def _smaller_batches(analysis: Analysis) -> Iterator[_Change]:
    batch = analysis.subject.batch_size
    if batch > 1:
        short, batches = analysis.summary.short_batches, analysis.summary.batches
        why = f"{short:,} of {batches:,} batches hold fewer than {batch} images, since each bucket ends in its own"
        yield _Change("batch_size", str(batch), str(batch // 2), why, analysis.subject.rule, batch // 2)


def _fixed(rule: FixedBuckets, bucket_set: BucketSet, switching: str) -> FixedBuckets:
    """Another set or switching within the limits of the rule."""
    return FixedBuckets(bucket_set, switching=switching, no_upscale=rule.no_upscale, max_crop=rule.max_crop)


def _kohya(rule: KohyaBuckets, **changes: object) -> KohyaBuckets | None:
    """The rule with other values; None where they cannot work."""
    values: dict[str, object] = {
        "max_reso": rule.max_reso, "min_size": rule.min_size, "max_size": rule.max_size,
        "reso_steps": rule.reso_steps, "no_upscale": rule.no_upscale, "switching": rule.switching,
        "no_upscale_fit": rule.no_upscale_fit, "max_crop": rule.max_crop,
    }  # fmt: skip
    try:
        changed = KohyaBuckets(**{**values, **changes})  # type: ignore[arg-type]
    except KohyaBucketError:
        return None
    return changed


def _summary(analysis: Analysis, rule: BucketRule, batch_size: int | None = None) -> Summary:
    images = analysis.images
    same = rule is analysis.subject.rule
    placement = analysis.placement if same else rule.place(images.sizes)
    return summarize(images.sizes, placement, images.repeats, batch_size or analysis.subject.batch_size)
