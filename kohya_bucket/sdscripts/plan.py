"""What training with a config will be: its datasets placed and planned by the objects that the adapter trains with."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.adapter.dataset_keys import at_resolutions, rule_for
from kohya_bucket.adapter.findings import Findings
from kohya_bucket.adapter.gpu_table import GpuRow, gpu_rows
from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.kept_sizes import scan_sizes
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.placing import PlacedDataset
from kohya_bucket.buckets.focus import FocusCuts
from kohya_bucket.buckets.misfits import BARELY, enlargement, shortened
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.sizes import SizeScan
from kohya_bucket.latents.architectures import Trainer
from kohya_bucket.sdscripts.config import Config, DatasetTable, ReadDataset
from kohya_bucket.sdscripts.config.model import refuse_random_crops
from kohya_bucket.texts import counted, some

__all__ = [
    "DatasetOverview",
    "Enlarged",
    "GpuRow",
    "ImageRow",
    "Overview",
    "check_images",
    "name_unreadable",
    "overview",
]


@dataclass(frozen=True)
class ImageRow:
    """One image that is trained: sizes in pixels; `cut` are pixels of the resized image: left, top, right, bottom."""

    key: str
    size: tuple[int, int]
    bucket: tuple[int, int]
    resized: tuple[int, int]
    cut: tuple[int, int, int, int]
    crop_loss: float
    repeats: int


class Enlarged(NamedTuple):
    """How many images of a bucket are scaled up, and how many times at most (of images that shrink, below 1)."""

    images: int
    most: float


@dataclass(frozen=True)
class DatasetOverview:
    """One dataset.

    Attributes:
        read: what the config says of it.
        images: the images that are trained, in their buckets.
        sizes: [N, 2] their sizes.
        left_out: (key, reason) of the images that are not trained.
        turned: EXIF orientations of the images that ask for a turn or a mirroring, which sd-scripts does not do.
    """

    read: ReadDataset
    images: PlacedDataset
    sizes: IntArray
    left_out: tuple[tuple[str, str], ...]
    turned: tuple[int, ...] = ()

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each resolution that it trains at."""
        return self.images.per_resolution or (self.images.placement,)

    @property
    def focus_cuts(self) -> list[FocusCuts]:
        """What the crops of each resolution cut off the images' focus; none where no focus is set."""
        focus = self.images.focus
        return [] if focus is None else [FocusCuts.of(placement, focus) for placement in self.placements]

    def enlarged_per_bucket(self) -> list[Enlarged]:
        """One entry per bucket in use, in the order of `images.rows()`."""
        image, bucket = self.images.pairs
        scales = np.stack([enlargement(self.sizes, placement) for placement in self.placements])
        factor = scales[self.images.resolution_of_bucket[bucket], image]
        ends = np.searchsorted(bucket, np.arange(len(self.images.buckets) + 1))
        parts = [factor[start:end] for start, end in itertools.pairwise(ends.tolist())]
        return [Enlarged(int((part > BARELY).sum()), float(part.max(initial=0.0))) for part in parts]

    def image_rows(self) -> list[ImageRow]:
        """One row per image that is trained, with several resolutions one for each that it is trained at."""
        return [row for column in self.placements for row in self._rows_at(column)]

    def _rows_at(self, placement: Placement) -> list[ImageRow]:
        cuts = placement.cuts
        return [
            ImageRow(key, (w, h), (bw, bh), (rw, rh), (left, top, right, bottom), loss, repeats)
            for placed, key, (w, h), (bw, bh), (rw, rh), (left, top, right, bottom), loss, repeats in zip(
                placement.placed.tolist(),
                self.images.keys,
                self.sizes.tolist(),
                placement.bucket_sizes.tolist(),
                placement.resized_sizes.tolist(),
                cuts.tolist(),
                placement.crop_loss.tolist(),
                self.images.repeats.tolist(),
                strict=True,
            )
            if placed
        ]


@dataclass(frozen=True)
class Overview:
    """All datasets of a config, and the epoch on each number of GPUs."""

    options: AdapterOptions
    datasets: tuple[DatasetOverview, ...]
    gpus: tuple[GpuRow, ...]


def overview(
    config: Config,
    options: AdapterOptions,
    gpus: Sequence[int] = (1,),
    accumulate: int = 1,
    progress: Progress | None = None,
) -> Overview:
    """Place and plan what `config` trains.

    Args:
        config: as `read_config` gives it; what the images' headers show to be wrong is added to its findings.
        options: the adapter's options.
        gpus: numbers of processes to plan for.
        accumulate: batches whose gradients make one update.
        progress: called as `progress(done, total)` while image headers are read.

    Raises:
        KohyaBucketError: options from which no buckets follow, with the dataset's place in the config.
    """
    placed = []
    for dataset in config.datasets:
        try:
            placed.append(_place(dataset, dataset.images, options, progress, config.findings, config.trainer))
        except KohyaBucketError as error:
            raise type(error)(f"{dataset.config.place}: {error}") from error
    groups = [d.images for d in placed if len(d.images.keys)]
    if not groups:
        message = "no image can be trained, each for its own reason"
        config.findings.error("no-images", "", message, "see what is listed as not trained")
    planner = GroupPlanner(groups, options) if groups else None
    return Overview(options, tuple(placed), gpu_rows(planner, gpus, accumulate) if planner else ())


def _place(
    dataset: ReadDataset,
    images: DatasetTable,
    options: AdapterOptions,
    progress: Progress | None,
    findings: Findings,
    trainer: Trainer,
) -> DatasetOverview:
    refuse_random_crops(dataset.config.subsets, options)
    read = images.sizes(options.metadata_cache, progress)
    stated = check_images(dataset, read.rows, findings, options.metadata_cache, progress)
    placing = images.place(read, dataset.config.batch_size, dataset.config.dataset_keys, options)
    left_out = tuple((images.keys[i], reason) for i, reason in placing.left_out)
    turned = [scan.orientation[scan.rotated()].tolist() for scan in (read.scan, stated) if scan is not None]
    seen = DatasetOverview(dataset, placing.trained, read.rows[placing.kept], left_out, tuple(itertools.chain(*turned)))
    if images.predefined is None:
        _check_longest(seen, options, trainer, findings)
    return seen


def _check_longest(seen: DatasetOverview, options: AdapterOptions, trainer: Trainer, findings: Findings) -> None:
    """Say what a `max_bucket_reso` that is low for the resolution costs."""
    config = seen.read.config
    if options.rule != "kohya" or not config.enable_bucket:
        return
    for keys, placement in zip(at_resolutions(config.dataset_keys, options), seen.placements, strict=True):
        longest = trainer.longest(keys.resolution, keys.bucket_reso_steps)
        loss = shortened(rule_for(keys, options), seen.sizes, placement, longest)
        if loss is not None:
            message = f"at resolution {keys.resolution[0]}x{keys.resolution[1]} {loss.text}"
            findings.warning("short-buckets", config.place, message, f"max_bucket_reso = {longest}")


# The images that cannot be read, of a config whose mistakes keep it from being planned.


def name_unreadable(config: Config, progress: Progress | None = None) -> set[str]:
    """Add them to the config's findings, so that one run tells of them and of the mistakes; returns their paths."""
    # What metadata names and is not there has a finding of its own; a link to nothing is one of the folder's files.
    paths = list(dict.fromkeys(path for dataset in config.datasets for path in dataset.images.paths))
    bad = [(path, why) for _, path, why in scan_sizes(paths, "off", progress).failures if os.path.lexists(path)]
    if bad:
        names = [f"{path}: {why}" for path, why in bad]
        message = f"{counted(len(bad), 'image')} cannot be read ({some(names, 1)})"
        config.findings.warning("unreadable-image", "", message, "repair or remove", names)
    return {path for path, _ in bad}


# What only the images' headers tell: sizes that metadata states wrongly, control images that do not fit.


def check_images(
    dataset: ReadDataset,
    sizes: IntArray,
    findings: Findings,
    metadata_cache: str = "auto",
    progress: Progress | None = None,
) -> SizeScan | None:
    """Compare what the config and its metadata say with the files.

    Args:
        dataset: the dataset and its images.
        sizes: [N, 2] the sizes that the images are placed by: stated ones, or read ones; 0 where unreadable.
        findings: where to report.
        metadata_cache: the option of that name.
        progress: called as `progress(done, total)` while headers are read.

    Returns:
        what the headers say of the images whose sizes are stated.
    """
    images, scan = dataset.images, None
    stated = np.flatnonzero(images.stated_sizes.min(axis=1, initial=1) > 0)
    if len(stated):
        scan = scan_sizes([images.paths[i] for i in stated], metadata_cache, progress)
        _check_stated(dataset, stated, scan.sizes, findings)
    if images.conditioning:
        control = scan_sizes(images.conditioning, metadata_cache, progress).sizes
        _check_control(dataset, sizes, control, findings)
    if not dataset.config.enable_bucket:
        _check_one_size(dataset, sizes, findings)
    return scan


def _check_stated(dataset: ReadDataset, rows: npt.NDArray[np.intp], true: IntArray, findings: Findings) -> None:
    images, where = dataset.images, dataset.config.place
    unreadable = [images.keys[i] for i, size in zip(rows.tolist(), true.tolist(), strict=True) if not size[0]]
    if unreadable:
        count = counted(len(unreadable), "image")
        message = f"{count} with a size in the metadata cannot be read, and sd-scripts stops there"
        findings.error("unreadable-image", where, f"{message} ({some(unreadable)})", "replace or remove", unreadable)
    differs = (true[:, 0] > 0) & (true != images.stated_sizes[rows]).any(axis=1)
    if differs.any():
        names = [images.keys[i] for i in rows[differs].tolist()]
        first = rows[differs][0]
        said = "x".join(map(str, images.stated_sizes[first].tolist()))
        is_now = "x".join(map(str, true[differs][0].tolist()))
        message = (
            f"{counted(len(names), 'image')} with a different size than the metadata says, so sd-scripts distorts them "
            f"({images.keys[first]}: {said} stated, {is_now} in fact)"
        )
        findings.warning("stated-size", where, message, "write the metadata again", names)


def _check_control(dataset: ReadDataset, sizes: IntArray, control: IntArray, findings: Findings) -> None:
    images = dataset.images
    wanted = np.array([bool(path) for path in images.conditioning])
    wrong = np.flatnonzero(wanted & (sizes[:, 0] > 0) & (sizes != control).any(axis=1))
    if len(wrong) and dataset.config.enable_bucket:
        i = int(wrong[0])
        names = [images.conditioning[k] for k in wrong.tolist()]
        shown = "x".join(map(str, control[i].tolist())) if control[i][0] else "unreadable"
        message = (
            f"{counted(len(names), 'control image', 'has', 'have')} a different size than their image, and sd-scripts "
            "stops there "
            f"({names[0]}: {shown}, its image {'x'.join(map(str, sizes[i].tolist()))})"
        )
        findings.error("control-size", dataset.config.place, message, "make the sizes equal", names)


def _check_one_size(dataset: ReadDataset, sizes: IntArray, findings: Findings) -> None:
    config, images = dataset.config, dataset.images
    if config.resolution is None or any(s.random_crop or s.face_crop_aug_range for s in config.subsets):
        return
    other = np.flatnonzero((sizes[:, 0] > 0) & (sizes != np.array(config.resolution)).any(axis=1))
    if len(other):
        names = [images.keys[i] for i in other.tolist()]
        width, height = config.resolution
        message = (
            f"{counted(len(names), 'image')} with a different size than {width}x{height}: without enable_bucket "
            "sd-scripts stops at the first of them, unless latents are cached"
        )
        findings.warning("not-this-size", config.place, message, "set enable_bucket = true", names)
