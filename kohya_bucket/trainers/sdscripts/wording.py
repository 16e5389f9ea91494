"""What the adapter says in sd-scripts' log."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kohya_bucket.checks import is_first_process
from kohya_bucket.planning import RESOLUTION_MODES
from kohya_bucket.planning.plan import BucketCounts
from kohya_bucket.texts import counted, one_line, some
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import PlacedDataset

if TYPE_CHECKING:
    from kohya_bucket.latents.fingerprint import StaleReason

logger = logging.getLogger("kohya_bucket")

_SHOWN = 20
_SHOWN_SIZES = 16


def rule_text(images: PlacedDataset, options: AdapterOptions, *, enable_bucket: bool) -> str:
    """What decided the buckets of a dataset, and for a rule that looks at the images, which ones it offers."""
    if not enable_bucket:
        return "no buckets: enable_bucket is off"
    if options.rule == "kohya":
        return "sd-scripts' buckets"
    if options.rule != "auto":
        return f"rule {options.rule}"
    offered = [place.bucket_set for place in images.placements]
    sizes = [str(bucket) for one in offered if one is not None for bucket in one]
    return f"rule auto ({options.auto_method}) chose {some(sizes, _SHOWN_SIZES)}"


def bucket_table_lines(images: PlacedDataset, counts: BucketCounts, rule: str) -> list[str]:
    """The buckets in use, one line each: narrow, because sd-scripts' log leaves half a terminal.

    `counts` are of the plan of an epoch on one process.
    """
    rows = images.rows(counts)
    samples, batches = sum(row.samples for row in rows), sum(row.batches for row in rows)
    lines = [
        rule,
        f"{counted(len(images.keys), 'image')} in {counted(len(images.buckets), 'bucket')}",
        f"{counted(samples, 'sample')}, {counted(batches, 'batch')} an epoch",
        "   bucket samples batches crop",
    ]
    for row in rows:
        short = "+" if row.short_batches else " "
        lines.append(f"{row.bucket!s:>9} {row.samples:>7} {row.batches:>6}{short} {row.mean_crop_loss:>4.0%}")
    if any(row.short_batches for row in rows):
        lines.append("(+: its last batch is not full)")
    if images.mode is not None:
        lines.append(f"{len(images.per_resolution)} resolutions, {RESOLUTION_MODES[images.mode].text}")
    return lines


def skipped_lines(failures: Sequence[tuple[str, str]]) -> list[str]:
    """The images that are not trained, each with its reason."""
    return _listed(f"{counted(len(failures), 'image')} will not be trained:", failures)


def say_recached(reasons: Mapping[str, Sequence[StaleReason]]) -> None:
    """Name the caches that were there and could not be used, each with its reason."""
    from kohya_bucket.latents.fingerprint import as_text

    if reasons and is_first_process():
        texts = [(path, as_text(why)) for path, why in reasons.items()]
        lines = _listed(f"{counted(len(texts), 'cache')} could not be used and were made again:", texts)
        logger.warning("\n".join(lines))


def _listed(title: str, reasons: Sequence[tuple[str, str]]) -> list[str]:
    lines = [title, *(one_line(f"  {name}: {reason}") for name, reason in reasons[:_SHOWN])]
    more = len(reasons) - _SHOWN
    return lines if more <= 0 else [*lines, f"  … and {more} more (`kohya-bucket plan --images` lists all)"]
