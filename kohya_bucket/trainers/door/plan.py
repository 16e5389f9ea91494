"""What a config trains, of any trainer: its datasets and the epoch, for a reader and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from kohya_bucket.trainers.door.findings import Findings
from kohya_bucket.trainers.door.group import GpuRow
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import BucketRow, PlacedItems

_FORMAT = {"format": "kohya-bucket-plan", "version": 1}


class TrainingLength(Protocol):
    """How long a trainer's settings let it train."""

    def text(self, updates: int, unit: str) -> str:
        """The whole training, for a reader, where an epoch updates the weights so often; `unit` is "update", or "step"
        where each step is one."""


@dataclass(frozen=True)
class DatasetPlan:
    """One dataset.

    Attributes:
        number: which of the config's.
        title: for a reader, and the lines above and below its buckets.
        entry: what `--json` prints of it. Each trainer has a few keys of its own; `buckets` and `not_trained` are
            alike, and what a bucket holds is called `images` or `items`.
        rows: one for each image or clip that is trained.
    """

    number: int
    title: str
    above: Sequence[str]
    entry: Mapping[str, Any]
    below: Sequence[str] = ()
    rows: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Plan:
    """What a config trains.

    Attributes:
        trainer: its name, for messages.
        head: what `--json` begins with.
        accumulate: batches for one update of the weights.
        unplanned: numbers of the datasets from which no buckets follow.
        length: how long it trains, where the file says so.
        left_out: whether images have no bucket, of which no finding says so.
        hint: how the trainer is told the config, where that may be mistaken.
    """

    trainer: str
    findings: Findings
    head: Mapping[str, Any]
    datasets: Sequence[DatasetPlan]
    gpus: Sequence[GpuRow]
    options: AdapterOptions
    accumulate: int = 1
    unplanned: Sequence[int] = ()
    length: TrainingLength | None = None
    left_out: bool = False
    hint: str = ""

    def as_dict(self, all_names: bool = False) -> dict[str, Any]:
        """What `--json` prints, as `plan.schema.json` says. Keys are added; another change makes a new version.

        Findings name at most 1,000 files each, or with `all_names` all.
        """
        return {
            **_FORMAT,
            **self.head,
            "settings": asdict(self.options),
            "datasets": [{"number": data.number, **data.entry} for data in self.datasets],
            "gpus": [row.as_dict() for row in self.gpus],
            "findings": [finding.as_dict(all_names) for finding in self.findings],
        }


def entry_of_items(
    items: PlacedItems, rows: Sequence[BucketRow], files: int, left_out: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """What the entries of datasets of items have in common."""
    return {
        "files": files,
        "items": len(items.keys),
        "samples": sum(row.samples for row in rows),
        "batches": sum(row.batches for row in rows),
        "buckets": [_bucket_of_items(row) for row in rows],
        "not_trained": [{"path": path, "reason": reason, "mend": {}} for path, reason in left_out],
    }


def _bucket_of_items(row: BucketRow) -> dict[str, Any]:
    entry = {("items" if name == "images" else name): value for name, value in asdict(row).items()}
    if controls := row.bucket[3:]:
        size, frames = row.bucket[:2], row.bucket[2]
        entry |= {"bucket": (*size, *[frames] * (frames > 1)), "controls": [one or size for one in controls]}
    return entry


def mode_text(in_buckets: bool, no_upscale: bool) -> str:
    """How images of several sizes are trained, in a title."""
    return "one size" if not in_buckets else "no upscaling" if no_upscale else "buckets"


def times_text(repeats: Sequence[int]) -> str:
    """How often an epoch trains each file, behind their number; `repeats` are sorted."""
    if not repeats:
        return ""
    if repeats[0] != repeats[-1]:
        return f", {repeats[0]} to {repeats[-1]} times each"
    return ", once each" if repeats[0] == 1 else f", {repeats[0]} times each"
