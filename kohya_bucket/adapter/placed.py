"""The images of one sd-scripts dataset in their buckets: what `plan` prints and what the adapter trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import BucketSet, Placement
from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.buckets.rule import InSet
from kohya_bucket.buckets.sizes import IntArray, as_pair, size_keys, sizes_of_keys
from kohya_bucket.errors import ConfigError
from kohya_bucket.planning.demand_model import DemandModel
from kohya_bucket.planning.options import PlanOptions

__all__ = ["BucketRow", "PlacedDataset"]


@dataclass(frozen=True)
class BucketRow:
    """One bucket of a dataset, for tables.

    `samples` counts repeats; `batches` are per process; crop losses are shares of the resized image.
    """

    bucket: Bucket
    images: int
    samples: int
    batches: int
    short_batches: int
    mean_crop_loss: float
    worst_crop_loss: float


@dataclass(frozen=True)
class PlacedDataset:
    """N images of one dataset, placed.

    Attributes:
        keys: [N] the image keys (paths), in the dataset's order.
        repeats: [N] how often an epoch trains each image.
        placement: their placement, at the first resolution at which they have one; images without a bucket are still
            in it, and are never trained.
        batch_size: images per process and step.
        per_resolution: one placement per resolution where there are several; none otherwise.
        sizes: [N, 2] the images' own sizes; needed where images are trained outside of their bucket.
        mode, weights: how several resolutions are used; see `plan_epoch`.
        no_upscale: whether no image may be trained in a bucket that is larger than its own.
    """

    keys: Sequence[str]
    repeats: npt.NDArray[np.int64]
    placement: Placement
    batch_size: int
    per_resolution: tuple[Placement, ...] = ()
    sizes: IntArray | None = None
    mode: str | None = None
    weights: tuple[float, ...] | None = None
    no_upscale: bool = False

    @cached_property
    def buckets(self) -> list[tuple[int, int]]:
        """The sizes in use, resolution by resolution, sorted by (width, height): sd-scripts' `resos`."""
        return [as_pair(size) for values, _ in self._distinct for size in sizes_of_keys(values)]

    @property
    def frames(self) -> list[int]:
        """[K] ones: these are images."""
        return [1] * len(self.buckets)

    @cached_property
    def resolution_of_bucket(self) -> npt.NDArray[np.intp]:
        """[K] resolution that a bucket belongs to."""
        return np.repeat(np.arange(len(self._distinct)), [len(values) for values, _ in self._distinct])

    @cached_property
    def bucket_ids(self) -> IntArray:
        """[N] int32 position in `buckets`, or [N, R] for R resolutions; -1 without a bucket."""
        ids = np.full((len(self.keys), len(self._places)), -1, dtype=np.int32)
        first = 0
        for column, (place, (values, inverse)) in enumerate(zip(self._places, self._distinct, strict=True)):
            ids[place.placed, column] = inverse + first
            first += len(values)
        return ids if self.per_resolution else ids[:, 0]

    @property
    def _places(self) -> tuple[Placement, ...]:
        return self.per_resolution or (self.placement,)

    @cached_property
    def _distinct(self) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]]:
        return [np.unique(size_keys(at.bucket_sizes[at.placed]), return_inverse=True) for at in self._places]

    @cached_property
    def pairs(self) -> tuple[npt.NDArray[np.intp], IntArray]:
        """([P] image, [P] bucket): every bucket of every image, bucket by bucket."""
        ids = self.bucket_ids.reshape(len(self.keys), len(self._places))
        image, column = np.nonzero(ids >= 0)
        bucket = ids[image, column]
        order = np.argsort(bucket, kind="stable")
        return image[order], bucket[order]

    def crop_losses(self) -> npt.NDArray[np.float64]:
        """[P] share that is cropped off, for each of `pairs`."""
        image, bucket = self.pairs
        losses = np.stack([place.crop_loss for place in self._places])
        out: npt.NDArray[np.float64] = losses[self.resolution_of_bucket[bucket], image]
        return out

    def size_at(self, image: int, bucket: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(bucket size, resized size) of an image in any bucket, its own or one that it is moved to."""
        size = self.buckets[bucket]
        place = self._places[int(self.resolution_of_bucket[bucket])]
        if place.bucket_index[image] >= 0 and tuple(place.bucket_sizes[image].tolist()) == size:
            width, height = place.resized_sizes[image].tolist()
            return size, (width, height)
        if self.sizes is None:
            raise ConfigError(f"{self.keys[image]} is to be trained at {size[0]}x{size[1]}, but its size is not known")
        only = BucketSet.from_dims([size])
        moved = InSet(self.sizes[image : image + 1], only, np.zeros(1, dtype=np.int32)).placement()
        width, height = moved.resized_sizes[0].tolist()
        return size, (width, height)

    @cached_property
    def samples_per_bucket(self) -> npt.NDArray[np.int64]:
        """[K] trainings asked of the first epoch: images times repeats, each resolution in its turn."""
        options = PlanOptions(repeats=self.repeats, resolutions=self.mode, resolution_weights=self.weights)
        return DemandModel(self.bucket_ids, len(self.buckets), options).for_epoch(0, 1).demand.per_bucket()

    @property
    def batches(self) -> int:
        """Batches of one epoch on one process: each bucket's samples, rounded up to whole batches."""
        return int(np.sum(-(-self.samples_per_bucket // self.batch_size)))

    def bucket_info(self) -> dict[str, Any]:
        """What sd-scripts writes into a LoRA's metadata as `bucket_info`, equal to the last digit."""
        errors = np.concatenate([place.aspect_errors[place.placed] for place in self._places])
        return {
            "buckets": {
                i: {"resolution": size, "count": int(count)}
                for i, (size, count) in enumerate(zip(self.buckets, self.samples_per_bucket, strict=True))
                if count > 0
            },
            "mean_img_ar_error": np.mean(np.abs(errors)) if len(errors) else 0,
        }

    def rows(self) -> list[BucketRow]:
        """One row per bucket in use, in `buckets` order."""
        ends = np.searchsorted(self.pairs[1], np.arange(len(self.buckets) + 1))
        losses = self.crop_losses()
        out = []
        for k, (size, samples) in enumerate(zip(self.buckets, self.samples_per_bucket, strict=True)):
            mine = losses[ends[k] : ends[k + 1]]
            batches = -(-int(samples) // self.batch_size)
            out.append(
                BucketRow(
                    bucket=Bucket(*size),
                    images=len(mine),
                    samples=int(samples),
                    batches=batches,
                    short_batches=int(samples % self.batch_size > 0),
                    mean_crop_loss=float(np.mean(mine)),
                    worst_crop_loss=float(np.max(mine)),
                )
            )
        return out
