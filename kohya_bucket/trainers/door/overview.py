"""A config's datasets, placed and planned: what `plan` and `doctor` begin with, whichever trainer's config it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from kohya_bucket.buckets.sizes import FloatArray
from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.images.parallel import Progress
from kohya_bucket.planning.plan import BucketCounts
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.file_findings import Section, ShowProgress
from kohya_bucket.trainers.door.findings import Findings, Severity
from kohya_bucket.trainers.door.group import GpuRow, epoch_of, no_batch
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import BucketRow, PlacedDataset, PlacedItems
from kohya_bucket.trainers.door.placing import refuse_unmatched


@dataclass(frozen=True, kw_only=True)
class PlannedDataset:
    """One dataset; each trainer adds what it has to say besides.

    Attributes:
        name, place: the dataset's, for a reader, and where findings say it is in the config.
        files: how many it has; remark: what else is to be said of it.
        items: what is trained of them.
        rows: one for each bucket, with what the epoch's plan trains of it.
    """

    name: str = ""
    place: str = ""
    files: str = ""
    remark: str = ""
    items: PlacedDataset | PlacedItems
    rows: tuple[BucketRow, ...] = ()


Planned = TypeVar("Planned", bound=PlannedDataset)


@dataclass(frozen=True)
class Overview(Generic[Planned]):
    """The datasets of a config from which buckets follow, and the epoch on each number of GPUs.

    Attributes:
        unreadable: paths of images that cannot be read, of the other datasets.
    """

    options: AdapterOptions
    datasets: tuple[Planned, ...] = ()
    gpus: tuple[GpuRow, ...] = ()
    unreadable: frozenset[str] = frozenset()

    @classmethod
    def planned(
        cls, placed: Iterable[Planned], options: AdapterOptions, gpus: Sequence[int], accumulate: int,
        findings: Findings, *, moves: bool = True,
    ) -> Overview[Planned]:  # fmt: skip
        """The plan of an epoch of datasets without rows; what is wrong with it is added to the findings.

        `moves`: images can be trained in other buckets than their own.
        """
        placed = list(placed)
        counts, gpu_rows = epoch_of([data.items for data in placed], options, gpus, accumulate)
        rows = [tuple(data.items.rows(trained)) for data, trained in zip(placed, counts, strict=True)]
        with_short = [k for k, trained in enumerate(counts) if _has_short(trained)]
        merged = None
        if with_short and moves and options.remainder != "merge":
            with suppress(KohyaBucketError):
                asked = replace(options, remainder="merge", small_buckets=None)
                merged = epoch_of([data.items for data in placed], asked, (), 1)[0]
        for k in with_short:
            _name_short(placed[k], counts[k], None if merged is None else int(merged[k].short.sum()), findings)
        for row in gpu_rows:
            if row.never_trained:
                on = f"on {counted(row.gpus, 'GPU')}: " if len(gpu_rows) > 1 else ""
                if row.steps:
                    findings.warning("never-trained", "", on + row.left_over, names=row.never_trained)
                else:
                    findings.error("never-trained", "", on + no_batch(row.left_over), names=row.never_trained)
        with_rows = tuple(replace(data, rows=own) for data, own in zip(placed, rows, strict=True))
        return cls(options, with_rows, gpu_rows)


_SOME, _MANY = 0.1, 0.25
"""Shares of batches that are not full, one apart: that is so however images are dealt to buckets."""


def _has_short(counts: BucketCounts) -> bool:
    short = int(counts.short.sum())
    return short > 1 and short - 1 >= _SOME * int(counts.batches.sum())


def _name_short(data: PlannedDataset, counts: BucketCounts, merged: int | None, findings: Findings) -> None:
    """Name the buckets whose batches are not full, and the images of those that fill none.

    `merged`: how many such batches "merge" would leave; None where it cannot.
    """
    short, batches = int(counts.short.sum()), int(counts.batches.sum())
    items, empty = data.items, counts.full - counts.smallest
    sizes = [
        f"{width}x{height}" + f"x{n}" * (n > 1) for (width, height), n in zip(items.buckets, items.frames, strict=True)
    ]
    worst = sorted(np.flatnonzero(counts.short).tolist(), key=lambda k: (-empty[k], sizes[k]))
    held = some([f"{sizes[k]} with {counts.smallest[k]} of {counts.full[k]}" for k in worst])
    fills_none = counts.short == counts.batches
    image, bucket = items.pairs
    names = [
        f"{items.keys[i]}: {sizes[k]}" for i, k in zip(image.tolist(), bucket.tolist(), strict=True) if fills_none[k]
    ]
    message = f"{short:,} of {batches:,} batches are not full ({held})"
    if names:
        message += f"; {counted(len(names), 'image', 'is', 'are')} in buckets that fill none ({some(names, 2)})"
    ways = ['"pad" fills them with repeats']
    if merged is not None:
        ways.insert(0, f'"merge" leaves {merged:,}, with images in the next best bucket')
    remedy = f"[kohya_bucket] remainder = {'; '.join(ways)}; or more repeats, or a smaller batch size"
    report = findings.warning if short - 1 >= _MANY * batches else findings.note
    report("short-batches", data.place, message, remedy, names)


def place_datasets(
    places: Sequence[str], place: Callable[[int], Planned | None], findings: Findings, nothing: Sequence[str]
) -> list[Planned]:
    """What `place` makes of the number of each dataset, without those of which it makes None.

    Args:
        places: what messages call the datasets.
        nothing: code, message and remedy of the finding that no item of a config without mistakes is trained.

    Raises:
        KohyaBucketError: as `place` raises it, with the dataset's place.
    """
    placed, stopped = [], bool(findings.of(Severity.ERROR))
    for number, name in enumerate(places):
        try:
            data = place(number)
        except KohyaBucketError as error:
            raise type(error)(f"{name}: {error}") from error
        if data is not None:
            placed.append(data)
    if not stopped and len(placed) == len(places) and not any(len(data.items.keys) for data in placed):
        code, message, remedy = nothing
        findings.error(code, "", message, remedy)
    return placed


def check_unmatched(options: AdapterOptions, focuses: Sequence[FloatArray | None], findings: Findings) -> None:
    """Name a focus that no image of any dataset has."""
    try:
        refuse_unmatched(options, focuses)
    except ConfigError as error:
        findings.error("focus", "", str(error))


def add_overview(
    section: Section, show: ShowProgress, reading: str, look: Callable[[Progress | None], Overview[Planned]]
) -> Overview[Planned] | None:
    """Put the facts of what `look` sees into a section of `doctor`; where it raises, the reason, and None."""
    try:
        with show(reading) as progress:
            seen = look(progress)
    except KohyaBucketError as error:
        section.findings.error("settings", "", str(error))
        return None
    for data in seen.datasets:
        batches = counted(sum(row.batches for row in data.rows), "batch")
        text = f"{data.files} in {counted(len(data.rows), 'bucket')}, {batches} an epoch{data.remark}"
        section.facts.append((data.name, text))
    return seen
