"""What a report is about: images or clips as columns, with the rule that they are placed by."""

from __future__ import annotations

import ntpath
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import BucketRule, Placement
from kohya_bucket.buckets.clips import ClipPlacement
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.errors import ConfigError
from kohya_bucket.images import SizeScan
from kohya_bucket.images.clips import ClipScan
from kohya_bucket.images.formats import CAPTION_EXTENSIONS
from kohya_bucket.planning.plan import BucketCounts
from kohya_bucket.planning.resolutions import RESOLUTION_MODES
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.findings import Finding, Findings
from kohya_bucket.trainers.door.group import epoch_of
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import InBuckets, PlacedDataset, first_placed
from kohya_bucket.trainers.door.placing import each_once
from kohya_bucket.trainers.door.programs import Programs


@dataclass(frozen=True)
class ClipFacts:
    """N clips of a report's subject, whose pictures are its images.

    Attributes:
        scan: what is known of each.
        placement: the items that are trained of them; None where no config says which frames are taken.
    """

    scan: ClipScan
    placement: ClipPlacement | None = None

    def lines(self) -> list[str]:
        """For a reader."""
        frames = self.scan.frames[self.scan.frames > 0]
        if not len(frames):
            return []
        rates = sorted({f"{rate:.5g}" for rate in self.scan.fps.tolist() if rate > 0}, key=float)
        text = f"{int(frames.sum()):,} frames in {np.nansum(self.scan.seconds):,.1f} s; a clip has {frames.min():,} to "
        text += f"{frames.max():,} of them (median {np.median(frames):,.0f})"
        out = [text + (f", {some(rates, 6)} per second" if rates else "")]
        if self.scan.counted.any():
            out.append(f"The frames of {counted(int(self.scan.counted.sum()), 'clip')} were counted by decoding")
        if self.scan.rotation.any():
            turned = counted(int((self.scan.rotation != 0).sum()), "clip")
            out.append(f"{turned} that players turn, and training takes as stored")
        if self.scan.flaws:
            out.append(some([f"{self.scan.paths[i]} {why}" for i, why in self.scan.flaws.items()]))
        if self.placement is not None:
            told = self.as_dict()
            short = int((~self.placement.placed & (self.scan.frames > 0)).sum())
            out.append(
                f"{counted(told['items'], 'item')} with {told['frames_kept']:,} of {told['frames']:,} frames; "
                f"{told['seconds_lost']:,.1f} s in no item; {counted(short, 'clip')} too short for any"
            )
            shapes = zip(self.placement.buckets.tolist(), self.placement.items_per_bucket.tolist(), strict=True)
            out.append("Items: " + ", ".join(f"{'x'.join(map(str, shape))} {n:,}" for shape, n in shapes))
        return [*out, "Here each clip counts once, as a picture; `kohya-bucket plan CONFIG` counts items and batches"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON; frames are those that are left at the rate that is trained."""
        scan, placed = self.scan, self.placement
        out: dict[str, Any] = {
            "clips": len(scan),
            "frames_in_files": int(scan.frames.sum()),
            "seconds": float(np.nansum(scan.seconds)),
            "counted": int(scan.counted.sum()),
            "rotated": int((scan.rotation != 0).sum()),
            "flawed": len(scan.flaws),
        }
        if placed is not None:
            lost = np.nan_to_num(scan.seconds) * (1 - placed.kept / np.maximum(placed.frames, 1))
            out |= {
                "items": len(placed.spans),
                "frames": int(placed.frames.sum()),
                "frames_kept": int(placed.kept.sum()),
                "seconds_lost": float(lost[placed.frames > 0].sum()),
                "buckets": [
                    {"bucket": shape, "items": n}
                    for shape, n in zip(placed.buckets.tolist(), placed.items_per_bucket.tolist(), strict=True)
                ],
            }
        return out


DEEP = "16 bits of grey, of which nearly all is trained as white"
TRANSPARENT = "transparent parts, of which the colours underneath are trained"


@dataclass(frozen=True)
class ImageTable:
    """N images.

    Attributes:
        paths: [N] paths as they are opened.
        sizes: [N, 2] int32 stored (width, height); (0, 0) where unreadable.
        repeats: [N] how often an epoch trains each.
        orientation: [N] EXIF orientation, 1 is upright.
        failures: index -> why its size could not be read.
        unlisted: index -> why no trainer lists it, by its name; such images have no size, and are in no failure.
        misread: index -> what a trainer reads it as, instead of what people see.
        mislabelled: index -> how its name and its content differ.
        hashes: [N] content hashes (empty where there is none), or None where they were not computed.
        captions: endings of caption files, tried in this order beside an image.
        upright: the trainer turns them as EXIF asks, so `sizes` are those of turned images, and `orientation` is 1.
    """

    paths: Sequence[str]
    sizes: IntArray
    repeats: npt.NDArray[np.int64]
    orientation: npt.NDArray[np.uint8]
    failures: Mapping[int, str] = field(default_factory=dict)
    unlisted: Mapping[int, str] = field(default_factory=dict)
    misread: Mapping[int, str] = field(default_factory=dict)
    mislabelled: Mapping[int, str] = field(default_factory=dict)
    hashes: Sequence[str] | None = None
    captions: tuple[str, ...] = CAPTION_EXTENSIONS
    upright: bool = False

    @classmethod
    def sized(cls, paths: Sequence[str], sizes: IntArray, **more: Any) -> ImageTable:
        """A table of paths and sizes, and `more` of the fields; what is not given is one repeat and upright."""
        n = len(paths)
        columns: dict[str, Any] = {"repeats": np.ones(n, np.int64), "orientation": np.ones(n, np.uint8)}
        return cls(paths, sizes, **columns | more)

    @classmethod
    def from_scan(cls, scan: SizeScan, hashes: Sequence[str] | None = None) -> ImageTable:
        """What `kohya_bucket.images.read_sizes` returned."""
        mislabelled = {i: what for i, _, what in scan.mislabelled()}
        return cls.sized(
            scan.paths, scan.sizes, orientation=scan.orientation, failures=scan.unreadable, mislabelled=mislabelled,
            hashes=hashes,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.paths)

    def take(self, rows: npt.NDArray[np.intp]) -> ImageTable:
        """The images of these rows, in this order; a row may stand several times."""
        chosen = rows.tolist()

        def moved(notes: Mapping[int, str]) -> dict[int, str]:
            return {at: notes[i] for at, i in enumerate(chosen) if i in notes}

        return replace(
            self, paths=[self.paths[i] for i in chosen], sizes=self.sizes[rows], repeats=self.repeats[rows],
            orientation=self.orientation[rows], failures=moved(self.failures), unlisted=moved(self.unlisted),
            misread=moved(self.misread), mislabelled=moved(self.mislabelled),
            hashes=None if self.hashes is None else [self.hashes[i] for i in chosen],
        )  # fmt: skip

    def without(self, broken: Mapping[str, str]) -> ImageTable:
        """The same with the images at these paths unreadable, for the reasons given."""
        sizes, reasons = self._left_out(broken)
        return replace(self, sizes=sizes, failures={**self.failures, **reasons})

    def without_unlisted(self, unlisted: Mapping[str, str]) -> ImageTable:
        """The same with the images at these paths listed by no trainer, for the reasons given."""
        sizes, reasons = self._left_out(unlisted)
        failures = {i: why for i, why in self.failures.items() if i not in reasons}
        return replace(self, sizes=sizes, failures=failures, unlisted=reasons)

    def _left_out(self, why: Mapping[str, str]) -> tuple[IntArray, dict[int, str]]:
        reasons = {i: why[path] for i, path in enumerate(self.paths) if path in why} if why else {}
        sizes = self.sizes.copy()
        sizes[list(reasons)] = 0
        return sizes, reasons

    @property
    def not_read(self) -> dict[int, str]:
        """Why images are not trained whatever their bucket: index -> reason."""
        return {**self.failures, **self.unlisted}

    @property
    def readable(self) -> npt.NDArray[np.bool_]:
        """[N] bool: the image has a size."""
        return np.asarray(self.sizes.min(axis=1, initial=1) > 0) if len(self) else np.zeros(0, dtype=np.bool_)

    def short_name(self, i: int) -> str:
        """Path of image `i` without the folder that all share; for lists on a page."""
        path = self.paths[i]
        return (path.replace("\\", "/") if self._shared[1] else path)[self._shared[0] :]

    @cached_property
    def _shared(self) -> tuple[int, bool]:
        """Length of the folder that all paths share, its slash included, and whether backslashes separate, too."""
        ends = [min(self.paths, default=""), max(self.paths, default="")]  # what these share, all share
        windows = bool(ntpath.splitdrive(ends[0])[0])
        ends = [path.replace("\\", "/") if windows else path for path in ends]
        return os.path.commonprefix(ends).rfind("/") + 1, windows  # noqa: RUF071  (cut off at a slash)


class HeaderReader(Protocol):
    """Reads the files of a config's datasets as the user asked for it."""

    def say(self, line: str) -> None:
        """Say a line beside the output."""

    def table(self, paths: Sequence[str]) -> ImageTable:
        """The headers of images."""

    def clips(self, paths: Sequence[str]) -> tuple[ClipFacts, ImageTable]:
        """What is known of clips, and their frames as images."""

    def decoded(self, images: ImageTable) -> ImageTable:
        """The same with what their pixels show, where they are to be decoded."""


@dataclass(frozen=True)
class Epoch:
    """The epoch that trains a subject's images.

    Attributes:
        datasets: those that are planned together; a list may grow until the epoch is asked for.
        number: which of them holds the subject's images; resolution: which of its resolutions the subject is about.
        items: what that one is, in a placement of its images, where batches are made by more than their buckets.
    """

    datasets: Sequence[InBuckets]
    number: int = 0
    resolution: int = 0
    items: Callable[[Placement], InBuckets] | None = None

    def counts(self, placement: Placement, no_upscale: bool, options: AdapterOptions) -> BucketCounts:
        """What it trains, on one process, of the K buckets of a placement of the subject's images.

        Raises:
            PlanError: a remainder policy cannot do with that placement.
        """
        images = self._placed_anew(placement, no_upscale) if self.items is None else self.items(placement)
        datasets, number = [images], 0
        if RESOLUTION_MODES[options.resolution_mode].one_per_epoch:  # else other datasets change nothing on one process
            others = [one.trained if isinstance(one, PlacedDataset) else one for one in self.datasets]
            number = self.number
            datasets = [*others[:number], images, *others[number + 1 :]]
        counts = epoch_of(datasets, options, (), 1)[0][number]
        at = {bucket.as_tuple(): k for k, bucket in enumerate(placement.bucket_set or ())}
        here = images.resolution_of_bucket == self.resolution
        wider = np.array([at[size] for size, keep in zip(images.buckets, here, strict=True) if keep], dtype=np.intp)
        return BucketCounts(*(column[here] for column in counts)).within(wider, len(at))

    def _placed_anew(self, placement: Placement, no_upscale: bool) -> PlacedDataset:
        dataset, at = cast("PlacedDataset", self.datasets[self.number]), self.resolution
        placements, first = dataset.per_resolution, placement
        if placements:
            placements = each_once([*placements[:at], placement, *placements[at + 1 :]])
            first = first_placed(placements)
        return replace(dataset, placement=first, per_resolution=placements, no_upscale=no_upscale).trained


@dataclass(frozen=True)
class Subject:
    """One dataset with the rule it is placed by.

    Attributes:
        name: what it is called in the report, e.g. its folder.
        images: its images.
        rule: what decides buckets.
        batch_size: images per process and step.
        source: where the rule comes from, for the reader, e.g. a config's path.
        programs: what settings are proposed for; None: all of the usual trainer.
        clips: where the images are the frames of clips, what else is known of these.
        focus: [N, 4] what each image's crop keeps, see `buckets/focus.py`; None: all crops are in the middle.
        options: what decides the batches of an epoch, beside `batch_size`.
        epoch: the epoch that trains them; None: one of theirs alone.
        findings: what is wrong with what lies beside the images.
    """

    name: str
    images: ImageTable
    rule: BucketRule
    batch_size: int = 1
    source: str = ""
    programs: Programs | None = None
    clips: ClipFacts | None = None
    focus: FloatArray | None = None
    options: AdapterOptions = field(default_factory=AdapterOptions)
    epoch: Epoch | None = None
    findings: Sequence[Finding] = ()

    @property
    def model(self) -> str:
        """What settings are proposed for, for a reader; "" for any."""
        return self.programs.title if self.programs else ""

    @property
    def batches_of(self) -> str:
        """What decides how large batches are, for a reader."""
        budgets = (f"{name} = {getattr(self.options, name):g}" for name in ("max_pixels", "max_tokens")
                   if getattr(self.options, name) is not None)  # fmt: skip
        return ", ".join(budgets) or f"batch size {self.batch_size}"

    def counts(self, placement: Placement, rule: BucketRule) -> BucketCounts:
        """What an epoch trains of the K buckets of a placement of all N images by a rule; `PlanError` as `Epoch`."""
        epoch, options = self.epoch, self.options
        if epoch is None:
            images = PlacedDataset(self.images.paths, self.images.repeats, placement, self.batch_size)
            epoch, options = Epoch((images,)), options.unscheduled()
        return epoch.counts(placement, bool(getattr(rule, "no_upscale", False)), options)


def some_subjects(
    subjects: list[Subject], config: Path, what: str, findings: Findings
) -> tuple[list[Subject], list[Finding]]:
    """The subjects, and what is wrong with their config; `ConfigError` where no dataset has any of `what`."""
    if not subjects:
        reasons = "; ".join(finding.text for finding in findings.serious[:3])
        raise ConfigError(f"{config}: no dataset with {what} in it: {reasons}")
    return subjects, findings.serious


@dataclass(frozen=True)
class Explored:
    """What the explorer's page of a config begins with.

    Attributes:
        tables: the images of each dataset that can be trained.
        findings: what is wrong with the config.
        focus: what `[kohya_bucket] focus` names, and [N, 4] the rectangles of the tables' images, where there are some.
        text: the dataset config that the page saves with what is changed; None for settings that name folders.
        numbers: for each table the place of its dataset in `text`, from 0.
        keys, batch_size: of the first dataset; regularization: [N] which of its images are for that.
    """

    tables: Sequence[ImageTable]
    findings: Sequence[Finding]
    focus: tuple[str, Sequence[FloatArray]] | None
    text: Path | None
    numbers: Sequence[int]
    keys: DatasetKeys
    batch_size: int
    regularization: npt.NDArray[np.bool_]
