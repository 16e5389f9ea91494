"""What to change, in settings or in the files themselves, and what it would gain; and rules side by side.

Every number comes from placing the same images again. Settings are only such as the trainer accepts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import (
    AutoBuckets,
    BucketRule,
    BucketSet,
    FixedBuckets,
    KohyaBuckets,
    list_presets,
    load_preset,
)
from kohya_bucket.buckets.misfits import (
    BARELY,
    MUCH_ENLARGED,
    enlargement,
    limit_cost,
    narrowest_usual,
    too_long,
    too_small,
)
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import BucketSettingsError, PlanError
from kohya_bucket.images.formats import is_video
from kohya_bucket.images.headers import say_orientations
from kohya_bucket.images.origins import container_of
from kohya_bucket.images.remote import is_url
from kohya_bucket.reports.analysis import Analysis
from kohya_bucket.reports.summary import Summary, summarize
from kohya_bucket.texts import counted
from kohya_bucket.trainers.door.face import Asked
from kohya_bucket.trainers.door.findings import HARMFUL, HARMS, MINOR, NOT_TRAINED, STOPS, fix_command, is_minor
from kohya_bucket.trainers.door.programs import Programs
from kohya_bucket.trainers.door.registry import usual_trainer
from kohya_bucket.trainers.door.subject import DEEP


@dataclass(frozen=True)
class Recommendation:
    """One change and what it does to this dataset.

    Attributes:
        setting: the key to change, as sd-scripts or the command line names it, or "files" for the images themselves.
        current, proposed: its value now and the one to try.
        why: what is wrong now, in one sentence.
        gain, cost: what gets better and what gets worse, measured; `cost` may be empty.
        before, after: the placements in numbers.
        harm: what it does to a training that files are as they are, one of `HARMS`; "" of settings.
        listed: which of `Analysis.lists` has the files; count: how many there are.
        must: the trainer refuses the value that it has now.
    """

    setting: str
    current: str
    proposed: str
    why: str
    gain: str
    cost: str
    before: Summary
    after: Summary
    harm: str = ""
    listed: str = ""
    count: int = 0
    must: bool = False


def _short_share(summary: Summary) -> float:
    return summary.short_batches / summary.batches if summary.batches else 0.0


def _unplaced_share(summary: Summary) -> float:
    return summary.unplaced / max(summary.placed + summary.unplaced, 1)


def worth(before: Summary, after: Summary) -> float:
    """How much a change is worth, in percentage points of crop loss; 0 or less: do not mention it.

    Settings buy crop loss with batches that are not full, or with enlarged images, so these must count in one unit:
    without one, by the gravest number that changes, the usual longer buckets would not be proposed to photographs.
    """
    if before.placed and not after.placed:  # of no image nothing is cropped
        return 0.0
    more = after.mean_pixels / before.mean_pixels - 1 if before.mean_pixels else 0.0
    gains = (  # (points, the least that is worth a mention)
        (100 * (before.mean_crop - after.mean_crop), 0.1),
        (25 * (before.p95_crop - after.p95_crop), 0.25),
        (10 * (before.enlarged - after.enlarged), 0.3),  # an enlarged image counts like 10% cropped
        (8 * (_short_share(before) - _short_share(after)), 0.6),
        (100 * (_unplaced_share(before) - _unplaced_share(after)), 0.0),  # an image without a bucket is cropped away
        ((20 if more > 0 else 2) * more, 0.5),  # fewer pixels hardly count: a lower resolution is a choice
    )
    return sum(points for points, _ in gains) if any(points > least for points, least in gains) else 0.0


def differences(before: Summary, after: Summary) -> tuple[str, str]:
    """What gets better and what gets worse, as text."""
    lines: tuple[list[str], list[str]] = ([], [])
    short = f"{before.short_batches:,} of {before.batches:,} → {after.short_batches:,} of {after.batches:,}"
    for name, old, new, floor, text in (
        ("mean crop loss", before.mean_crop, after.mean_crop, 0.0005, ""),
        ("crop loss of 19 of 20 images, at most", before.p95_crop, after.p95_crop, 0.002, ""),
        ("worst crop loss", before.worst_crop, after.worst_crop, 0.01, ""),
        ("enlarged images", before.enlarged, after.enlarged, 0.002, ""),
        ("images without a bucket", before.unplaced, after.unplaced, 1, f"{before.unplaced:,} → {after.unplaced:,}"),
        ("batches that are not full", _short_share(before), _short_share(after), 0.002, short),
    ):
        if abs(old - new) >= floor and (floor == 1 or (before.placed and after.placed)):
            lines[new > old].append(f"{name} {text or f'{_percent(old)} → {_percent(new)}'}")
    if before.mean_pixels and abs(after.mean_pixels / before.mean_pixels - 1) >= 0.01:
        text = f"pixels trained per image {before.mean_pixels / 1e6:.3g} → {after.mean_pixels / 1e6:.3g} million"
        lines[after.mean_pixels < before.mean_pixels].append(text)
    return "; ".join(lines[0]), "; ".join(lines[1])


def _percent(share: float) -> str:
    if share == 0:
        return "0%"
    return f"{100 * share:.2f}%" if share < 0.1 else f"{100 * share:.1f}%"


Mask = npt.NDArray[np.bool_]


def about_files(analysis: Analysis) -> Iterator[Recommendation]:
    """Changes to the images themselves, and to what lies beside them."""
    images = analysis.images
    for one in analysis.subject.findings:
        current = ": ".join(filter(None, (one.where, one.message)))
        yield _unmeasured(analysis, current, one.remedy, "", "", one.harm, "", one.count)
    if broken := images.failures:
        fix = "repair or remove" + _fix([images.paths[i] for i in broken], "; {} sets aside what cannot be decoded")
        gain, why = f"{counted(len(broken), 'more image')}, or a clean log", _not_trained(len(broken))
        yield _unmeasured(analysis, f"{len(broken):,} unreadable", fix, why, gain, NOT_TRAINED, "broken", len(broken))
    if unlisted := images.unlisted:
        fix, gain = fix_command(images.paths[i] for i in unlisted), counted(len(unlisted), "more image")
        current, why = f"{counted(len(unlisted), 'file')} named as no trainer lists one", _not_trained(len(unlisted))
        yield _unmeasured(
            analysis, current, f"convert or rename: {fix}", why, gain, NOT_TRAINED, "not_listed", len(unlisted)
        )
    if misread := images.misread:
        deep = [images.paths[i] for i, why in misread.items() if why == DEEP]
        ways = [f"bring 16-bit grey to 8 bits: {fix_command(deep)}"] if deep else []
        ways += ["put transparent ones onto a background"] if len(deep) < len(misread) else []
        why = "Trainers see other pixels than people do"
        gain = counted(len(misread), "image", "trained as it is seen", "trained as they are seen")
        current = f"{len(misread):,} read as something else"
        harm = _harm(analysis, len(misread))
        yield _unmeasured(analysis, current, "; ".join(ways), why, gain, harm, "misread", len(misread))
    long = too_long(analysis.images.sizes, analysis.placement)
    if count := int(long.sum()):
        sizes, loss = analysis.images.sizes[long].astype(np.float64), analysis.placement.crop_loss[long]
        aspects = sizes.max(axis=1) / sizes.min(axis=1)
        yield _without(
            analysis, long, f"{counted(count, 'image')} far longer than a bucket", "split or leave out",
            f"{'It is' if count == 1 else 'They are'} {_span(aspects, '{:.1f}')} times as long as wide, and "
            f"{loss.mean():.0%} of {'it' if count == 1 else 'them'} is cut off",
            "outliers",
        )  # fmt: skip
    small = too_small(analysis.images.sizes, analysis.placement)
    if count := int(small.sum()):
        yield _without(
            analysis, small, f"{counted(count, 'image')} enlarged more than {MUCH_ENLARGED:g} times",
            "replace by larger ones or leave out",
            f"{'Its' if count == 1 else 'Their'} sides are scaled up {_span(analysis.scale[small], '{:.3g}')} times, "
            f"so {'a blurred image is' if count == 1 else 'blurred images are'} trained",
            "most_enlarged",
        )  # fmt: skip
    yield from _turned(analysis)
    yield from _copies(analysis)


def _not_trained(count: int) -> str:
    return "It is not trained" if count == 1 else "They are not trained"


def _fix(paths: list[str], says: str) -> str:
    """What `fix` does for files; nothing for clips, and for images in tars or at addresses, which it does not open."""
    others = (container_of(path) or is_video(path) or is_url(path) for path in paths)
    return "" if any(others) else says.format(fix_command(paths))


def _unmeasured(
    analysis: Analysis, current: str, proposed: str, why: str, gain: str, harm: str, listed: str, count: int
) -> Recommendation:
    """Of files whose change shows in no placement."""
    before = after = analysis.summary
    return Recommendation("files", current, proposed, why, gain, "", before, after, harm, listed, count)


def _harm(analysis: Analysis, count: int) -> str:
    """Of so many images that are trained as nobody means it."""
    return MINOR if is_minor(count, len(analysis.images)) else HARMFUL


def misfits(analysis: Analysis) -> Mask:
    """[N] images that are to be split, replaced or left out: too long or too small for any usual bucket."""
    sizes, placement = analysis.images.sizes, analysis.placement
    return too_long(sizes, placement) | too_small(sizes, placement)


def bad_files(analysis: Analysis) -> list[str]:
    """Paths of all that cannot be trained, or not as it is: unreadable, without a bucket, too long, too small."""
    images = analysis.images
    bad = ~images.readable | misfits(analysis)
    bad[analysis.unplaced] = True
    return [images.paths[i] for i in np.flatnonzero(bad).tolist()]


def _turned(analysis: Analysis) -> Iterator[Recommendation]:
    images, before, subject = analysis.images, analysis.summary, analysis.subject
    turned = analysis.rotated
    if len(turned):
        sizes = np.where(images.orientation[:, None] >= 5, images.sizes[:, ::-1], images.sizes)
        cost = ""
        if subject.focus is not None:
            count = int((~np.isnan(subject.focus[turned]).any(axis=1)).sum())
            cost = f"{counted(count, 'focus rectangle')} must be turned with them" if count else ""
        placement = subject.rule.place(sizes)
        after = summarize(sizes, placement, subject.counts(placement, subject.rule))
        moved = int((placement.bucket_sizes != analysis.placement.bucket_sizes)[turned].any(axis=1).sum())
        fix = _fix([images.paths[i] for i in turned.tolist()], ": {}")
        gain = f"trained as they are seen, {moved:,} of them in another bucket"
        if len(turned) == 1:
            gain = f"trained as it is seen, in {'another' if moved else 'the same'} bucket"
        yield Recommendation(
            "files", f"{len(turned):,} turned or mirrored by EXIF", f"turn the pixels{fix}",
            f"Training ignores the tag ({say_orientations(images.orientation[turned].tolist())})",
            gain, cost, before, after, _harm(analysis, len(turned)), "exif_rotated", len(turned),
        )  # fmt: skip


def _copies(analysis: Analysis) -> Iterator[Recommendation]:
    if duplicates := analysis.duplicates:
        spare = np.zeros(len(analysis.images), dtype=np.bool_)
        spare[[i for group in duplicates for i in group[1:]]] = True
        after = _summary_of(analysis, ~spare, analysis.subject.rule)
        yield Recommendation(
            "files", counted(int(spare.sum()), "copy"), "keep one of each group",
            f"{counted(len(duplicates), 'image', 'is', 'are')} there more than once, and trained that much more often",
            _samples(analysis.summary, after), "", analysis.summary, after, MINOR, "duplicates", int(spare.sum()),
        )  # fmt: skip


def _without(analysis: Analysis, left_out: Mask, current: str, proposed: str, why: str, listed: str) -> Recommendation:
    before, after = analysis.summary, _summary_of(analysis, ~left_out, analysis.subject.rule)
    gain, cost = differences(before, after)
    cost = "; ".join(filter(None, (_samples(before, after), cost)))
    count = int(left_out.sum())
    harm = _harm(analysis, count)
    return Recommendation("files", current, proposed, why, gain, cost, before, after, harm, listed, count)


def _summary_of(analysis: Analysis, kept: Mask, rule: BucketRule) -> Summary:
    subject = analysis.subject
    sizes = np.where(kept[:, None], analysis.images.sizes, 0).astype(np.int32)
    placement = rule.place(sizes)
    return summarize(sizes, placement, subject.counts(placement, rule))


def _samples(before: Summary, after: Summary) -> str:
    return f"samples per epoch {before.samples:,} → {after.samples:,}"


def _span(values: npt.NDArray[np.float64], form: str) -> str:
    low, high = form.format(values.min()), form.format(values.max())
    return low if low == high else f"{low} to {high}"


_ENLARGED_GOAL = 0.05


class Change(NamedTuple):
    """One setting with another value; `must`: a trainer refuses the value it has."""

    setting: str
    current: str
    proposed: str
    why: str
    rule: BucketRule
    must: bool = False


def changes(rule: BucketRule, programs: Programs, sizes: IntArray, enlarged: float) -> Iterator[Change]:
    """Each with its rule, worth it or not. Of two that may come to the same, the simpler one is first.

    Args:
        sizes: [N, 2] of the images that changes are tried on; `enlarged` is the share of them that is enlarged now.
    """
    if isinstance(rule, KohyaBuckets):
        yield from _steps(rule, programs)
        yield from (_upscaling(rule, sizes) if rule.no_upscale else _limits(rule, programs, sizes, enlarged))
        if not rule.no_upscale and enlarged > 0.2:
            yield from _lower_resolution(rule, sizes)
        if not rule.no_upscale and rule.switching != "geometric":
            why = "The middle between two aspects is not where both buckets crop the same share"
            yield from _tried("[kohya_bucket] switching", rule.switching, "geometric", why, rule, switching="geometric")
    elif isinstance(rule, FixedBuckets):
        yield from _other_presets(rule, programs)
        if rule.switching != "geometric":
            why = "Geometric switching is the one that crops least"
            changed = _fixed(rule, rule.bucket_set, "geometric")
            yield Change("[kohya_bucket] switching", rule.switching, "geometric", why, changed)


def _steps(rule: KohyaBuckets, programs: Programs) -> Iterator[Change]:
    """A step that the trainer accepts, where it refuses the one there is; or half the step, if it accepts that."""
    steps, least = rule.reso_steps, programs.step
    if programs.title and steps % least:
        proposed = -(-steps // least) * least
        why = f"{steps} is refused by {programs.title}: only multiples of {least} are accepted"
        low, high = rule.min_size // proposed * proposed, -(-rule.max_size // proposed) * proposed
        values = {"reso_steps": proposed, "min_size": max(low, proposed), "max_size": high}
        yield from _tried("bucket_reso_steps", str(steps), str(proposed), why, rule, must=True, **values)
    elif steps % (2 * least) == 0:
        why = f"Buckets in steps of {steps} leave wide gaps between their aspects"
        if programs.title:
            why += f"; multiples of {least} are accepted by {programs.title}"
        yield from _tried("bucket_reso_steps", str(steps), str(steps // 2), why, rule, reso_steps=steps // 2)


def _limits(rule: KohyaBuckets, programs: Programs, sizes: IntArray, enlarged: float) -> Iterator[Change]:
    """Longer and narrower buckets, up to the usual ones: what is longer still is a matter of the files."""
    steps = rule.reso_steps
    longest, lowest = programs.longest(rule.max_reso, steps), narrowest_usual(rule.max_reso, steps)
    if longest > rule.max_size:
        wider = partial(rule.changed, max_size=longest)
        what = f"no bucket is longer than {rule.max_size}"
        why = limit_cost(what, rule, wider, sizes, longest) or f"{what}, so long images are cropped"
        why = why[:1].upper() + why[1:]
        yield from _tried("max_bucket_reso", str(rule.max_size), str(longest), why, rule, max_size=longest)
    if lowest < rule.min_size:
        wider = partial(rule.changed, min_size=lowest)
        what = f"no bucket is narrower than {rule.min_size}"
        why = limit_cost(what, rule, wider, sizes, lowest) or f"{what}, so long images are cropped"
        why = why[:1].upper() + why[1:]
        yield from _tried("min_bucket_reso", str(rule.min_size), str(lowest), why, rule, min_size=lowest)
        if longest > rule.max_size:
            now, then = f"{rule.min_size} and {rule.max_size}", f"{lowest} and {longest}"
            both = "min_bucket_reso and max_bucket_reso"
            yield from _tried(both, now, then, why, rule, min_size=lowest, max_size=longest)
    why = "Each image keeps its own aspect, in as many buckets as there are sizes"
    if enlarged:
        why = "Images smaller than their bucket are scaled up, so blurred images are trained"
    yield from _tried("bucket_no_upscale", "false", "true", why, rule, no_upscale=True, switching="midpoint")


def _upscaling(rule: KohyaBuckets, sizes: IntArray) -> Iterator[Change]:
    now, used = rule.no_upscale_fit, _used(rule, sizes)
    for fit, why in (
        ("largest", "Sides are floored to the step, where a larger size often fits"),
        ("standard", "Sizes that occur become buckets of their own, also of images that would fill a usual one"),
    ):
        for change in _tried("[kohya_bucket] no_upscale_fit", now, fit, why, rule, no_upscale_fit=fit):
            if fit != now and (fit != "standard" or _used(change.rule, sizes) < used):  # all that it is for
                yield change
    why = "Without upscaling, every size that occurs becomes a bucket of its own"
    texts = "bucket_no_upscale", "true", "false"
    if rule.no_upscale_fit != "kohya":  # refused with upscaling
        now = f"true and {rule.no_upscale_fit}"
        texts = "bucket_no_upscale and [kohya_bucket] no_upscale_fit", now, "false and none"
    yield from _tried(*texts, why, rule, no_upscale=False, no_upscale_fit="kohya")


def _used(rule: BucketRule, sizes: IntArray) -> int:
    placed = rule.place(sizes)
    return len(np.unique(placed.bucket_sizes[placed.placed], axis=0))


def _tried(
    setting: str, current: str, proposed: str, why: str, rule: KohyaBuckets, must: bool = False, **values: object
) -> Iterator[Change]:
    """The change, where the values can work together."""
    try:
        yield Change(setting, current, proposed, why, rule.changed(**values), must=must)
    except BucketSettingsError:
        return


def _lower_resolution(rule: KohyaBuckets, sizes: IntArray) -> Iterator[Change]:
    """The highest square resolution at which few images are enlarged."""
    steps = rule.reso_steps
    side = int(math.sqrt(rule.max_area)) // steps * steps
    now, why = "{},{}".format(*rule.max_reso), "Most images hold fewer pixels than the resolution asks for"
    for resolution in range(side - steps, max(steps, rule.min_size, side // 2) - 1, -steps):
        for change in _tried("resolution", now, str(resolution), why, rule, max_reso=(resolution, resolution)):
            placement = change.rule.place(sizes)
            scale = enlargement(sizes, placement)[placement.placed]
            if np.count_nonzero(scale > BARELY) <= _ENLARGED_GOAL * len(scale):
                yield change
                return


def _other_presets(rule: FixedBuckets, programs: Programs) -> Iterator[Change]:
    """Presets of about the same area, whose sides the trainer accepts."""
    area = float(np.median([b.pixel_count for b in rule.bucket_set]))
    now = rule.bucket_set.name
    now = "auto" if isinstance(rule, AutoBuckets) else f"preset:{now}" if now in list_presets() else now or "own set"
    for name in list_presets():
        bucket_set = load_preset(name)
        other = float(np.median([b.pixel_count for b in bucket_set]))
        accepted = all(bucket.is_multiple_of(programs.step) for bucket in bucket_set)
        if accepted and bucket_set.buckets != rule.bucket_set.buckets and 0.8 < other / area < 1.25:
            proposed = _fixed(rule, bucket_set, rule.switching)
            why = f"Preset {name} has {len(bucket_set)} buckets instead of {len(rule.bucket_set)}"
            yield Change("[kohya_bucket] rule", now, f"preset:{name}", why, proposed)


def _fixed(rule: FixedBuckets, bucket_set: BucketSet, switching: str) -> FixedBuckets:
    return FixedBuckets(bucket_set, switching=switching, no_upscale=rule.no_upscale, max_crop=rule.max_crop)


_MANY = 0.25  # of the images: so many are not exceptions, and a setting may be what is wrong


def recommend(analysis: Analysis) -> list[Recommendation]:
    """Changes that are worth it for these images: of files first, the most harmful of most files, then of settings, the
    most effective first.

    A setting is listed when it lowers the mean or the 95th percentile of crop loss, the share of enlarged images,
    of short batches or of images without a bucket, or trains more pixels, by a margin that matters, and by more
    than it costs elsewhere; or when the trainer refuses the value it has. All values that are proposed are such as the
    subject's trainer accepts. Settings are tried without the few images that the advice on files is to split or leave
    out, so that they are not bent for those.
    """
    files = sorted(about_files(analysis), key=lambda one: (HARMS.index(one.harm), -one.count))
    measurable = analysis.summary.placed or len(analysis.unplaced)
    return [*files, *(_about_settings(analysis) if measurable else ())]


def most_worth(analysis: Analysis, recommendations: Sequence[Recommendation]) -> Recommendation | None:
    """The one to begin with; None if nothing is recommended."""

    def weight(one: Recommendation) -> float:
        if one.harm == STOPS:
            return math.inf
        points = 100 if one.harm == NOT_TRAINED else 10  # an image that is trained otherwise counts like 10% cropped
        return points * one.count / max(len(analysis.images), 1) if one.before is one.after else _weight(one)

    return max(recommendations, key=weight, default=None)


def _about_settings(analysis: Analysis) -> list[Recommendation]:
    subject, images = analysis.subject, analysis.images
    # Settings are tried without the images that are to be split, replaced or left out, if these are few.
    unfit = misfits(analysis)
    count = int(unfit.sum())
    leaves_out = 0 < count <= _MANY * analysis.summary.placed
    kept = ~unfit if leaves_out else np.ones(len(images), dtype=np.bool_)
    before = _summary_of(analysis, kept, subject.rule) if leaves_out else analysis.summary
    beside = f"; measured without the {'file' if count == 1 else f'{count:,} files'} above" if leaves_out else ""
    # Measure each change, and keep those that are worth it.
    worthwhile: list[Recommendation] = []
    programs = subject.programs or usual_trainer().programs(Asked())
    for change in changes(subject.rule, programs, images.sizes[kept], before.enlarged):
        try:
            after = _summary_of(analysis, kept, change.rule)
        except PlanError:  # refused beside the options that the config has
            continue
        if worth(before, after) > 0 or change.must:
            gain, cost = differences(before, after)
            texts = *change[:3], change.why + beside, gain, cost
            worthwhile.append(Recommendation(*texts, before, after, must=change.must))
    worthwhile = [one for one in worthwhile if one.must or not _covered_by_limits(one, worthwhile)]
    out: list[Recommendation] = []
    # Keep the best for each setting, and of several with one outcome, however many buckets stand empty, the simplest,
    # which is the first.
    for advice in sorted(worthwhile, key=_weight, reverse=True):
        same = replace(advice.after, buckets=0)
        if not any(other.setting == advice.setting or replace(other.after, buckets=0) == same for other in out):
            out.append(advice)
    return out


def _covered_by_limits(one: Recommendation, recommendations: Sequence[Recommendation]) -> bool:
    """Whether what `bucket_no_upscale` gains comes from being without the limits of sides, which can be set too."""
    limits = [other for other in recommendations if other.setting.startswith(("min_bucket_reso", "max_bucket_reso"))]
    best = max(limits, key=_weight, default=None)
    return one.setting == "bucket_no_upscale" and best is not None and worth(best.after, one.after) <= 0


def _weight(one: Recommendation) -> float:
    return math.inf if one.must else worth(one.before, one.after)
