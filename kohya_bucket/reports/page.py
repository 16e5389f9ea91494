"""The HTML report: what its script shows, the same for browsers that run none, and the file that holds both."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, features

from kohya_bucket._version import __version__
from kohya_bucket.buckets import AutoBuckets, BucketRule, BucketSet, FixedBuckets, KohyaBuckets, NovelAIBuckets, Reason
from kohya_bucket.buckets.sizes import as_sizes
from kohya_bucket.buckets.switching import AspectSwitch, aspect_switch
from kohya_bucket.images.formats import is_video
from kohya_bucket.images.parallel import Progress, for_each
from kohya_bucket.images.pixels import undecodable
from kohya_bucket.inputs import open_input
from kohya_bucket.reports.analysis import Analysis
from kohya_bucket.reports.one_file import SHARED_SCRIPTS, markup_safe, one_file
from kohya_bucket.reports.recommend import recommend
from kohya_bucket.texts import counted


def browser_rule(rule: BucketRule) -> dict[str, Any] | None:
    """What `templates/placement.js` needs to answer as `rule` does; None for rules it does not know.

    Thresholds are the exact doubles at which Python switches; JSON carries them unchanged.
    """
    if type(rule) is KohyaBuckets and rule.bucket_set is None:
        largest = rule.no_upscale_fit == "largest"
        keys = {"max_area": rule.max_area, "steps": rule.reso_steps, "max_crop": rule.max_crop}
        return {"kind": "no_upscale", "largest": largest, **keys}
    if type(rule) is NovelAIBuckets:
        return _novelai(rule)
    if rule.bucket_set is not None:
        if type(rule) in (KohyaBuckets, FixedBuckets, AutoBuckets):
            return _set(rule.bucket_set, rule)
        if _takes_everything(rule, rule.bucket_set):
            return _set(rule.bucket_set)
    return None


def _describe_rule(rule: BucketRule) -> str:
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


_MOST_POINTS = 2500


def aspect_histogram(analysis: Analysis) -> dict[str, Any] | None:
    """Counts over log2 of the aspect, in 160 equal bins that are symmetric about the square.

    All bins cover at least 1:2 to 2:1. Aspects beyond the 0.1% at either end are counted in the outermost bins.
    """
    if not len(analysis.aspects):
        return None
    logs = np.log2(analysis.aspects)
    tails = np.abs(np.quantile(logs, [0.001, 0.999])).max()
    reach = float(np.clip(tails * 1.05, 1.0, 5.0))
    counts, _ = np.histogram(np.clip(logs, -reach, reach), bins=160, range=(-reach, reach))
    beyond = int((np.abs(logs) > reach).sum())
    return {"reach": reach, "counts": counts.tolist(), "beyond": beyond}


def size_scatter(analysis: Analysis) -> list[list[float]]:
    """Points [width, height, images, mean crop loss], crop loss -1 without a bucket; at most 2,500.

    Equal sizes are one point. Where there are still too many, sizes are rounded on a logarithmic grid.
    """
    readable = analysis.images.readable
    sizes = analysis.images.sizes[readable].astype(np.int64)
    if not len(sizes):
        return []
    loss = np.where(analysis.placement.placed, analysis.placement.crop_loss, np.nan)[readable]
    cells, resolution = sizes, 96.0
    while True:
        keys = cells[:, 0] << 32 | cells[:, 1]
        _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        if len(counts) <= _MOST_POINTS:
            break
        cells = np.rint(np.log2(sizes) * resolution).astype(np.int64)
        resolution *= 0.8
    with_bucket = np.bincount(inverse, weights=~np.isnan(loss))
    total = np.bincount(inverse, weights=np.nan_to_num(loss))
    mean = np.where(with_bucket > 0, total / np.maximum(with_bucket, 1), -1.0)
    rows = zip(sizes[first].tolist(), counts.tolist(), mean.tolist(), strict=True)
    return [[*size, n, round(m, 4)] for size, n, m in rows]


def image_lists(analysis: Analysis, limit: int) -> list[dict[str, Any]]:
    """Lists of images that stand out, each with the first `limit`: key, title, count, rows, a line about it."""
    images, out = analysis.images, []
    for some in analysis.lists:
        first = some.images[:limit]
        if some.notes_only:
            kind, rows = "notes", [[images.short_name(i), some.text(i)] for i in first]
        else:
            shown = some.key in ("without_bucket", "exif_rotated", "focus_cut")  # other texts are in the columns
            kind, rows = "images", [image_row(analysis, i, some.text(i) if shown else "") for i in first]
        out.append({"key": some.key, "title": some.title, "count": len(some.images), "rows": rows, "about": some.about,
                    "kind": kind})  # fmt: skip
    return out


def image_row(analysis: Analysis, i: int, note: str) -> list[Any]:
    """[name, width, height, bucket index, crop loss, scale, note]; -1 where there is no bucket."""
    width, height = analysis.images.sizes[i].tolist()
    k = int(analysis.placement.bucket_index[i])
    if k < 0:
        return [analysis.images.short_name(i), width, height, -1, -1, -1, note]
    loss, scale = float(analysis.placement.crop_loss[i]), float(analysis.scale[i])
    return [analysis.images.short_name(i), width, height, k, round(loss, 5), round(scale, 4), note]


_PLAIN = "Charts, small pictures and the field to try a size need JavaScript, but no network. The numbers do not:"
_MOST_ROWS = 100
_WORST_FOCUS = 20


def in_one_line(analyses: Sequence[Analysis]) -> str:
    """How many images, in how many buckets, and what is cut off of them."""
    summaries = [a.summary for a in analyses]
    placed = sum(s.placed for s in summaries)
    crop = sum(s.mean_crop * s.placed for s in summaries) / max(placed, 1)
    left = sum(len(a.images) for a in analyses) - placed
    more = f", and {left:,} that cannot be trained" if left else ""
    buckets = counted(sum(s.buckets for s in summaries), "bucket")
    what = "clip" if analyses and all(a.subject.clips is not None for a in analyses) else "image"
    return f"{counted(placed, what)} in {buckets}, {crop:.1%} cut off on average{more}"


def _plain_dataset(analysis: Analysis) -> str:
    subject, images = analysis.subject, analysis.images
    used = sorted(analysis.used_buckets, key=lambda b: -b.images)
    rows = [
        (b.bucket, f"{b.images:,}", f"{b.batches:,}", f"{b.mean_crop:.1%}", f"{b.worst_crop:.1%}", f"{b.enlarged:.1%}")
        for b in used[:_MOST_ROWS]
    ]
    head = ("Bucket", "Images", "Batches", "Cut off, mean", "Worst", "Enlarged")
    lost = [(images.short_name(i), analysis.reason(i)) for i in (*sorted(images.failures), *analysis.unplaced.tolist())]
    placement = analysis.placement
    cropped = [
        (images.short_name(i), str(placement.bucket(i)), f"{placement.crop_loss[i]:.1%}")
        for i in analysis.most_cropped[:_MOST_ROWS].tolist()
    ]
    return (
        f"<h1>{markup_safe(subject.name)}</h1><p>{markup_safe(_describe_rule(subject.rule))}. "
        f"{markup_safe(in_one_line([analysis]))}.</p>"
        + _plain_table("Buckets", head, rows, len(used))
        + _plain_table("Not trained", ("Image", "Why"), lost[:_MOST_ROWS], len(lost))
        + _plain_table("Cropped most", ("Image", "Bucket", "Cut off"), cropped, len(analysis.most_cropped))
    )


def _plain_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[object]], count: int) -> str:
    if not count:
        return ""
    more = f", the first {_MOST_ROWS} of {count:,}" if count > _MOST_ROWS else ""
    top = "".join(f'<th scope="col">{markup_safe(name)}</th>' for name in head)
    body = "".join(
        f'<tr><th scope="row">{markup_safe(first)}</th><td>{"</td><td>".join(map(markup_safe, cells))}</td></tr>'
        for first, *cells in rows
    )
    return (
        f"<table><caption>{markup_safe(caption + more)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table>"
    )


_SCRIPTS = [*SHARED_SCRIPTS, "report/size_chart.js", "report/panels.js", "report/report.js"]


def render_page(
    analyses: Sequence[Analysis],
    *,
    title: str = "",
    thumbnails: int = 240,
    limit: int = 300,
    progress: Progress | None = None,
    pictures: Pictures | None = None,
) -> str:
    """The report of one or several data sets as the text of an HTML file.

    Args:
        title: heading of the page; the first data set's name if empty.
        thumbnails: at most this many small pictures in the file, over all data sets; and of each data set at most 20
            of images whose focus the middle crop would cut.
        limit: at most this many images in each list.
        progress: called as `progress(done, total)` while the small pictures are made.
        pictures: those of `illustrate`; by default they are made here.
    """
    if pictures is None:
        analyses, pictures = illustrate(analyses, thumbnails, progress)
    title = title or (analyses[0].subject.name if analyses else "No images")
    data = {
        "title": title,
        "version": __version__,
        "made": datetime.now().strftime("%Y-%m-%d %H:%M"),
        "reasons": {int(r): r.text for r in Reason},
        "datasets": [
            {
                **_dataset(a, limit),
                "sheets": [{"bucket": k, "shots": _shots(a, chosen, pictures)} for k, chosen in examples],
                "focus": a.focus_cuts and {"text": str(a.focus_cuts), "shots": _shots(a, worst, pictures)},
            }
            for a, examples, worst in _shown(analyses, thumbnails)
        ],
    }
    about = in_one_line(analyses)
    return one_file(
        data,
        _SCRIPTS,
        ["shared/page.css"],
        title=f"{title}: {about} - kohya-bucket",
        about=f"kohya-bucket on {title}: {about}.",
        fallback=f'<div class="plain"><p>{_PLAIN}</p>{"".join(map(_plain_dataset, analyses))}</div>',
    )


def _dataset(analysis: Analysis, limit: int) -> dict[str, Any]:
    subject, images = analysis.subject, analysis.images
    return {
        "name": subject.name,
        "source": subject.source,
        "rule": browser_rule(subject.rule),
        "rule_text": _describe_rule(subject.rule),
        "batches_of": subject.batches_of,
        "clips": subject.clips and {"lines": subject.clips.lines(), "items": subject.clips.as_dict().get("items")},
        "found": len(images),
        "broken": int((~images.readable).sum()),
        "summary": asdict(analysis.summary),
        "underfilled": len(analysis.underfilled),
        "rare": {"count": len(analysis.rarely_used), "below": analysis.min_count},
        "advice": [
            {k: getattr(r, k) for k in ("setting", "current", "proposed", "why", "gain", "cost", "listed")}
            for r in recommend(analysis)
        ],
        "histogram": aspect_histogram(analysis),
        "scatter": size_scatter(analysis),
        "buckets": [
            [
                *b.bucket, b.images, b.samples, b.batches, b.last_batch,
                round(b.mean_crop, 5), round(b.worst_crop, 5), round(b.enlarged, 4), b.full_batch, b.underfilled,
            ]
            for b in analysis.buckets
        ],
        "lists": image_lists(analysis, limit),
    }  # fmt: skip


def _shots(analysis: Analysis, images: Sequence[int], pictures: Pictures) -> list[dict[str, Any]]:
    """Small pictures; the kept area and the focus as shares of the image: left, top, width, height."""
    shots = []
    for i in images:
        resized, bucket = analysis.placement.resized_sizes[i], analysis.placement.bucket_sizes[i]
        left_top = analysis.placement.select(np.array([i])).cuts[0, :2]
        shot = {
            "row": image_row(analysis, i, ""),
            "picture": pictures[analysis.images.paths[i]],
            "kept": [*(left_top / resized).round(4).tolist(), *(bucket / resized).round(4).tolist()],
            "caption": caption_beside(analysis.images.paths[i], analysis.images.captions),
        }
        focus = analysis.subject.focus
        if focus is not None and not np.isnan(focus[i]).any():
            shot["focus"] = [*focus[i, :2].round(4).tolist(), *(focus[i, 2:] - focus[i, :2]).round(4).tolist()]
        shots.append(shot)
    return shots


_AREA = 120 * 120
_LONGEST = 200
_BACKGROUND = (128, 128, 128)
_THREADS = 4


Pictures = dict[str, tuple[str, int, int] | None]
"""By path: (data URI, width, height), or None where there is no picture of it."""


def illustrate(
    analyses: Sequence[Analysis], thumbnails: int, progress: Progress | None = None
) -> tuple[list[Analysis], Pictures]:
    """Small pictures of the examples of all buckets; images that prove to be broken count as such from there on.

    Args:
        thumbnails: as `render_page` says.

    Returns:
        the analyses, without the images whose pixels cannot be decoded; the pictures.
    """
    out, pictures = list(analyses), Pictures()
    while True:
        shown = [(a, [*(some for _, some in examples), worst]) for a, examples, worst in _shown(out, thumbnails)]
        paths = [a.images.paths[i] for a, chosen in shown for some in chosen for i in some]
        new = [path for path in dict.fromkeys(paths) if path not in pictures]
        if not new:
            return out, pictures
        pictures |= zip(new, make_thumbnails(new, progress), strict=True)
        files = [path for path in new if pictures[path] is None and not is_video(path) and Path(path).is_file()]
        if broken := dict(undecodable(files)):
            out = [a.without(broken) for a in out]


def _shown(
    analyses: Sequence[Analysis], thumbnails: int
) -> list[tuple[Analysis, list[tuple[int, list[int]]], list[int]]]:
    """Of each analysis the examples of its buckets, and the images whose focus would be cut most."""
    share, worst = max(0, thumbnails) // max(len(analyses), 1), max(0, min(_WORST_FOCUS, thumbnails))
    return [(a, choose_examples(a, share), a.worst_focus[:worst].tolist()) for a in analyses]


def choose_examples(analysis: Analysis, total: int) -> list[tuple[int, list[int]]]:
    """Which images stand for each bucket: (bucket index, image indices), `total` images at most.

    The fullest buckets first. Within a bucket: the image that loses most, then others spread evenly over the
    losses down to the one that loses least.
    """
    used = sorted((i for i, b in enumerate(analysis.buckets) if b.images), key=lambda i: -analysis.buckets[i].images)
    if not used or total < 1:
        return []
    each = int(np.clip(total // len(used), 3, 12))
    loss, index = analysis.placement.crop_loss, analysis.placement.bucket_index
    order = np.lexsort((-loss, index))
    starts = np.searchsorted(index[order], np.arange(len(analysis.buckets) + 1))
    out = []
    for k in used:
        share = min(each, total)
        if share < 1:
            break
        mine = order[starts[k] : starts[k + 1]]
        chosen = mine[np.unique(np.linspace(0, len(mine) - 1, min(share, len(mine))).round().astype(int))]
        out.append((k, chosen.tolist()))
        total -= len(chosen)
    return out


def make_thumbnails(paths: Sequence[str], progress: Progress | None = None) -> list[tuple[str, int, int] | None]:
    """(data URI, width, height) of each image, unrotated; None where its pixels do not decode."""
    kind = "WEBP" if features.check("webp") else "JPEG"
    return for_each(partial(_thumbnail, kind), paths, progress=progress, at_once=_THREADS)


def _thumbnail(kind: str, path: str) -> tuple[str, int, int] | None:
    try:
        with open_input(path) as file, Image.open(file) as image:
            scale = min(1.0, (_AREA / (image.width * image.height)) ** 0.5, _LONGEST / max(image.size))
            size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
            image.draft("RGB", (2 * size[0], 2 * size[1]))
            return _encode(image, size, kind), *size
    except (OSError, ValueError, SyntaxError, MemoryError, Image.DecompressionBombError):
        return None


def _encode(image: Image.Image, size: tuple[int, int], kind: str) -> str:
    if image.mode in ("P", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
    elif image.mode.startswith("I;16") or image.mode in ("I", "F"):
        levels = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((levels / max(float(levels.max()), 1.0) * 255).clip(0, 255).astype(np.uint8))
    small = image.resize(size, Image.Resampling.BOX, reducing_gap=2.0)
    if small.mode == "RGBA":
        flat = Image.new("RGB", size, _BACKGROUND)
        flat.paste(small, mask=small.getchannel("A"))
        small = flat
    buffer = io.BytesIO()
    small.convert("RGB").save(buffer, kind, quality=55)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


def caption_beside(path: str, endings: Sequence[str], longest: int = 300) -> str | None:
    """The start of the caption file beside an image; None where there is none."""
    for ending in endings:
        try:
            with open_input(Path(path).with_suffix(ending)) as file:
                text = file.read(4 * (longest + 1)).decode("utf-8", "replace")[: longest + 1].strip()
        except (OSError, ValueError):
            continue
        return text if len(text) <= longest else text[:longest] + "…"
    return None
