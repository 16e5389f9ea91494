"""The items of a dataset as a plan takes them, and the batch at a place of it, loaded by ai-toolkit's own code."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset

from kohya_bucket.trainers.ai_toolkit.controls import Layout, control_layouts
from kohya_bucket.trainers.ai_toolkit.latents import why_bad
from kohya_bucket.trainers.ai_toolkit.objects import Dataset, FileItem
from kohya_bucket.trainers.door.batches import PlannedBatch, batch_of_the_readable
from kohya_bucket.trainers.door.placed import ItemsInBuckets

_LAST_ATTEMPT = 10  # of ai-toolkit, which then raises instead of drawing another image at random


@dataclass(frozen=True)
class FileItems(ItemsInBuckets):
    """N items of one dataset, in an order that no file system decides.

    Attributes:
        rows: [N] position of each in the dataset's `file_list`, which holds an item once for each repeat.
    """

    rows: Sequence[int] = ()

    @classmethod
    def from_dataset(cls, dataset: Dataset) -> FileItems:
        """What a dataset has put into buckets, each item once, except for repeats that are cut otherwise.

        Items of which nothing usable can be encoded are left out.
        """
        # A bucket of a plan has one layout: ai-toolkit's are parted by it.
        layouts = _layouts(dataset)
        rows_of_part: dict[tuple[str, Layout], list[int]] = {}
        for name, bucket in dataset.buckets.items():
            for row in bucket.file_list_idx:
                if not why_bad(dataset.file_list[row]):
                    rows_of_part.setdefault((name, layouts[row]), []).append(row)
        parts = sorted(rows_of_part)
        firsts = [dataset.file_list[rows_of_part[part][0]] for part in parts]
        buckets = [dataset.buckets[name] for name, _ in parts]
        rows_of_item: dict[tuple[Any, ...], list[int]] = {}
        for k, part in enumerate(parts):
            for row in rows_of_part[part]:
                item = dataset.file_list[row]
                cut = item.scale_to_width, item.scale_to_height, item.crop_x, item.crop_y
                rows_of_item.setdefault((str(item.path), k, item.flip_x, item.flip_y, *cut), []).append(row)
        items = sorted(rows_of_item.items())
        return cls(
            [path for (path, *_), _ in items],
            np.array([len(rows) for _, rows in items], dtype=np.int64),
            np.array([k for (_, k, *_), _ in items], dtype=np.int32),
            [(bucket.width, bucket.height, first.num_frames, *layout)
             for bucket, first, (_, layout) in zip(buckets, firsts, parts, strict=True)],
            [first.num_frames for first in firsts],
            int(dataset.batch_size),
            (int(dataset.dataset_config.resolution),) * 2,
            rows=[min(rows) for _, rows in items],
        )  # fmt: skip


def _layouts(dataset: Dataset) -> list[Layout]:
    """Of each item of `file_list`, what must be alike in a batch of its control images."""
    items = dataset.file_list
    paths = [[one] if isinstance(one, str) else list(one or ()) for one in (item.control_path for item in items)]
    raw, full_size = (
        any(getattr(item, name, False) for item in items)
        for name in ("use_raw_control_images", "full_size_control_images")
    )
    return control_layouts(paths, str(getattr(dataset.sd, "arch", "")), raw=raw, full_size=full_size)


class PlannedBatches(ConcatDataset[Any]):
    """ai-toolkit's datasets, asked for the batches of a plan.

    Args:
        datasets: those of a loader, unchanged.
        items: what each of them holds.
        on_bad_image: see `AdapterOptions`.
    """

    def __init__(self, datasets: Sequence[Any], items: Sequence[FileItems], on_bad_image: str) -> None:
        super().__init__(datasets)
        self.items, self.on_bad_image = items, on_bad_image

    def __getitem__(self, index: Any) -> list[Any]:
        """The items of the batch that a `PlannedBatch` describes, loaded."""
        dataset_items, dataset = self.items[index.dataset], self.datasets[index.dataset]

        def make(index: PlannedBatch) -> list[Any]:
            return [_loaded(dataset, dataset_items, i, index.bucket) for i in index.images.tolist()]

        return list(batch_of_the_readable(make, index, dataset_items, self.on_bad_image))


def _loaded(dataset: Any, dataset_items: FileItems, item: int, bucket: int) -> Any:
    row = dataset_items.rows[item]
    if dataset_items.bucket_ids[item] != bucket:
        moved = copy.copy(dataset.file_list[row])
        cut_to(moved, dataset_items.buckets[bucket], at_random=dataset.dataset_config.random_crop)
        dataset, row = copy.copy(dataset), 0
        dataset.file_list = [moved]
    return dataset._get_single_item(row, _LAST_ATTEMPT)


def cut_to(item: FileItem, bucket: tuple[int, int], *, at_random: bool) -> None:
    """Let an item be scaled and cut to another bucket, (width, height), as `setup_buckets` does for its own."""
    scale = item.dataset_config.scale  # type: ignore[attr-defined]
    width, height = int(item.width * scale), int(item.height * scale)
    factor = max(bucket[0] / width, bucket[1] / height)
    item.scale_to_width, item.scale_to_height = math.ceil(width * factor), math.ceil(height * factor)
    item.crop_width, item.crop_height = bucket
    spare = item.scale_to_width - bucket[0], item.scale_to_height - bucket[1]
    item.crop_x, item.crop_y = (random.randint(0, side) if at_random else int(side / 2) for side in spare)
