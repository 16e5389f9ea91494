"""What training with a config will be: its datasets placed and planned by the objects that the adapter trains with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kohya_bucket.adapter.dataset_keys import at_resolutions, rule_for
from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.lost_time import GpuRow, gpu_row
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.adapter.placed import PlacedDataset
from kohya_bucket.buckets.geometry import cut_pixels
from kohya_bucket.buckets.misfits import BARELY, enlargement, shortened
from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.parallel import Progress
from kohya_bucket.latents.architectures import Trainer
from kohya_bucket.sdscripts.config import Config, Findings, ImageList, ReadDataset
from kohya_bucket.sdscripts.config.image_checks import check_images
from kohya_bucket.sdscripts.plan.placing import place_listed, sizes_of

__all__ = ["DatasetOverview", "Enlarged", "GpuRow", "ImageRow", "Overview", "overview"]


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
        cuts = cut_pixels(placement.resized_sizes, placement.bucket_sizes)
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
    rows = [gpu_row(planner, n, accumulate) for n in gpus] if planner else []
    return Overview(options, tuple(placed), tuple(rows))


def _place(
    dataset: ReadDataset,
    images: ImageList,
    options: AdapterOptions,
    progress: Progress | None,
    findings: Findings,
    trainer: Trainer,
) -> DatasetOverview:
    sizes, unreadable, scan = sizes_of(images, options, progress)
    stated = check_images(dataset, sizes, findings, options.metadata_cache, progress)
    placing = place_listed(dataset, images, sizes, options, unreadable)
    left_out = tuple((images.keys[i], reason) for i, reason in placing.left_out)
    turned = [scan.orientation[scan.rotated()].tolist() for scan in (scan, stated) if scan is not None]
    seen = DatasetOverview(dataset, placing.trained, sizes[placing.kept], left_out, tuple(itertools.chain(*turned)))
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
