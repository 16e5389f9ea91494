"""Settings that are worth a try for a data set: only such as its trainers accept."""

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
from kohya_bucket.buckets.misfits import BARELY, LONGEST_ASPECT, enlargement, shortened
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import BucketSettingsError
from kohya_bucket.latents.trainers import Trainer
from kohya_bucket.reports.summary import Summary

__all__ = ["Change", "Tried", "changes"]

_ENLARGED_GOAL = 0.05


@dataclass(frozen=True)
class Change:
    """One setting with another value; `must`: a trainer refuses the value it has."""

    setting: str
    current: str
    proposed: str
    why: str
    rule: BucketRule
    batch_size: int | None = None
    must: bool = False


@dataclass(frozen=True)
class Tried:
    """What changes are tried on: images [N, 2], their rule, batch size and trainer, and what they come to now."""

    sizes: IntArray
    rule: BucketRule
    batch_size: int
    trainer: Trainer
    now: Summary


def changes(tried: Tried) -> Iterator[Change]:
    """Each with its rule, worth it or not. Of two that may come to the same, the simpler one is first."""
    rule = tried.rule
    if isinstance(rule, KohyaBuckets):
        yield from _steps(rule, tried.trainer)
        yield from (_upscaling(rule) if rule.no_upscale else _limits(rule, tried))
        yield from _lower_resolution(tried, rule)
        if not rule.no_upscale and rule.switching != "geometric":
            why = "The middle between two aspects is not where both buckets crop the same share"
            yield from _tried("[kohya_bucket] switching", rule.switching, "geometric", why, rule, switching="geometric")
    elif isinstance(rule, FixedBuckets):
        yield from _other_presets(rule, tried.trainer)
        if rule.switching != "geometric":
            why = "Geometric switching is the one that crops least"
            changed = _fixed(rule, rule.bucket_set, "geometric")
            yield Change("[kohya_bucket] switching", rule.switching, "geometric", why, changed)
    yield from _smaller_batches(tried)


def _steps(rule: KohyaBuckets, trainer: Trainer) -> Iterator[Change]:
    """A step that the trainer accepts, where it refuses the one there is; or half the step, if it accepts that."""
    steps, least = rule.reso_steps, trainer.step
    if trainer.title and steps % least:
        proposed = -(-steps // least) * least
        why = f"{steps} is refused by {trainer.title}: only multiples of {least} are accepted"
        low, high = rule.min_size // proposed * proposed, -(-rule.max_size // proposed) * proposed
        values = {"reso_steps": proposed, "min_size": max(low, proposed), "max_size": high}
        yield from _tried("bucket_reso_steps", str(steps), str(proposed), why, rule, must=True, **values)
    elif steps % (2 * least) == 0:
        why = f"Buckets in steps of {steps} leave wide gaps between their aspects"
        if trainer.title:
            why += f"; multiples of {least} are accepted by {trainer.title}"
        yield from _tried("bucket_reso_steps", str(steps), str(steps // 2), why, rule, reso_steps=steps // 2)


def _limits(rule: KohyaBuckets, tried: Tried) -> Iterator[Change]:
    """Longer and narrower buckets, up to the usual ones: what is longer still is a matter of the files."""
    steps = rule.reso_steps
    longest = tried.trainer.longest(rule.max_reso, steps)
    lowest = max(steps, int(math.isqrt(rule.max_area) / LONGEST_ASPECT**0.5) // steps * steps)
    if longest > rule.max_size:
        loss = shortened(rule, tried.sizes, rule.place(tried.sizes), longest)
        why = loss.text if loss else f"no bucket is longer than {rule.max_size}, so long images are cropped"
        yield from _tried("max_bucket_reso", str(rule.max_size), str(longest), _sentence(why), rule, max_size=longest)
    if lowest < rule.min_size:
        why = f"No bucket is narrower than {rule.min_size}, so long images are cropped to a shorter aspect"
        yield from _tried("min_bucket_reso", str(rule.min_size), str(lowest), why, rule, min_size=lowest)
        if longest > rule.max_size:
            now, then = f"{rule.min_size} and {rule.max_size}", f"{lowest} and {longest}"
            both = "min_bucket_reso and max_bucket_reso"
            yield from _tried(both, now, then, why, rule, min_size=lowest, max_size=longest)
    why = "Each image keeps its own aspect, in as many buckets as there are sizes"
    if tried.now.enlarged:
        why = "Images smaller than their bucket are scaled up, so blurred images are trained"
    yield from _tried("bucket_no_upscale", "false", "true", why, rule, no_upscale=True, switching="midpoint")


def _upscaling(rule: KohyaBuckets) -> Iterator[Change]:
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
    setting: str, current: str, proposed: str, why: str, rule: KohyaBuckets, must: bool = False, **values: object
) -> Iterator[Change]:
    """The change, where the values can work together."""
    try:
        yield Change(setting, current, proposed, why, rule.changed(**values), must=must)
    except BucketSettingsError:
        return


def _lower_resolution(tried: Tried, rule: KohyaBuckets) -> Iterator[Change]:
    """The highest square resolution at which few images are enlarged."""
    if rule.no_upscale or tried.now.enlarged <= 0.2:
        return
    steps = rule.reso_steps
    side = int(math.sqrt(rule.max_area)) // steps * steps
    low = max(steps, rule.min_size)
    why = "Most images hold fewer pixels than the resolution asks for"
    for resolution in range(side - steps, max(low, side // 2) - 1, -steps):
        now = f"{rule.max_reso[0]},{rule.max_reso[1]}"
        for change in _tried("resolution", now, str(resolution), why, rule, max_reso=(resolution, resolution)):
            if _enlarged(change.rule, tried.sizes) <= _ENLARGED_GOAL:
                yield change
                return


def _enlarged(rule: BucketRule, sizes: IntArray) -> float:
    placement = rule.place(sizes)
    scale = enlargement(sizes, placement)[placement.placed]
    return float(np.mean(scale > BARELY)) if len(scale) else 0.0


def _other_presets(rule: FixedBuckets, trainer: Trainer) -> Iterator[Change]:
    """Presets of about the same area, whose sides the trainer accepts."""
    area = float(np.median([b.pixel_count for b in rule.bucket_set]))
    for name in list_presets():
        bucket_set = load_preset(name)
        other = float(np.median([b.pixel_count for b in bucket_set]))
        accepted = all(bucket.is_multiple_of(trainer.step) for bucket in bucket_set)
        if accepted and bucket_set.buckets != rule.bucket_set.buckets and 0.8 < other / area < 1.25:
            proposed = _fixed(rule, bucket_set, rule.switching)
            why = f"Preset {name} has {len(bucket_set)} buckets instead of {len(rule.bucket_set)}"
            yield Change("[kohya_bucket] rule", _name_of(rule), f"preset:{name}", why, proposed)


def _name_of(rule: FixedBuckets) -> str:
    """The rule as `rule_from_name` knows it, or its set's name."""
    if isinstance(rule, AutoBuckets):
        return "auto"
    name = rule.bucket_set.name
    return f"preset:{name}" if name in list_presets() else name or "own set"


def _smaller_batches(tried: Tried) -> Iterator[Change]:
    batch = tried.batch_size
    if batch > 1:
        short, batches = tried.now.short_batches, tried.now.batches
        why = f"{short:,} of {batches:,} batches hold fewer than {batch} images, since each bucket ends in its own"
        yield Change("batch_size", str(batch), str(batch // 2), why, tried.rule, batch // 2)


def _fixed(rule: FixedBuckets, bucket_set: BucketSet, switching: str) -> FixedBuckets:
    """Another set or switching within the limits of the rule."""
    return FixedBuckets(bucket_set, switching=switching, no_upscale=rule.no_upscale, max_crop=rule.max_crop)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
