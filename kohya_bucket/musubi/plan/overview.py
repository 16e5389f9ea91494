"""What training with a musubi-tuner config will be: its items placed and planned by the objects that train them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kohya_bucket.adapter.gpu_rows import GpuRow, gpu_row
from kohya_bucket.adapter.group import GroupPlanner
from kohya_bucket.adapter.options import AdapterOptions
from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.musubi.config import MusubiConfig
from kohya_bucket.musubi.config.listing import list_items
from kohya_bucket.musubi.plan.clip_findings import check_clips
from kohya_bucket.musubi.plan.placing import PlacedData, Reading, place_data
from kohya_bucket.musubi.rules import ANY

__all__ = ["Overview", "overview"]


@dataclass(frozen=True)
class Overview:
    """All data sets of a config, and the epoch on each number of GPUs."""

    options: AdapterOptions
    datasets: tuple[PlacedData, ...]
    gpus: tuple[GpuRow, ...]


def overview(
    config: MusubiConfig, options: AdapterOptions, gpus: Sequence[int] = (1,), accumulate: int = 1,
    how: Reading | None = None,
) -> Overview:  # fmt: skip
    """Place and plan what `config` trains; what its files show to be wrong is added to its findings.

    Raises:
        KohyaBucketError: keys or options from which no buckets follow, with the data set's place in the config.
    """
    placed = []
    for keys, place in zip(config.datasets, config.places, strict=True):
        listed = list_items(keys, place, config.findings, config.architecture)
        try:
            data = place_data(keys, place, listed, config.architecture, config.findings, how or Reading())
        except KohyaBucketError as error:
            raise type(error)(f"{place}: {error}") from error
        check_clips(data, config.architecture or ANY, config.findings)
        placed.append(data)
    groups = [data.items for data in placed if len(data.items.keys)]
    if not groups:
        config.findings.error("no-items", "", "nothing can be trained, each for its own reason", "see what is listed")
        return Overview(options, tuple(placed), ())
    planner = GroupPlanner(groups, options)
    frames = np.array([n for items in groups for n in items.frames])
    latents = (config.architecture or ANY).grid.latent_frames(frames)
    costs = np.stack([planner.bucket_sizes.astype(np.int64).prod(axis=1), latents], axis=1).astype(np.int32)
    return Overview(options, tuple(placed), tuple(gpu_row(planner, n, accumulate, costs) for n in gpus))
