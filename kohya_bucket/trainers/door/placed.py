"""A dataset whose images have their buckets: rows of tables, and what each bucket holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import BucketSet, Placement
from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.buckets.focus import focused
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.rule import InSet
from kohya_bucket.buckets.sizes import FloatArray, IntArray, Size, as_pair, size_keys, sizes_of_keys
from kohya_bucket.errors import ConfigError
from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.planning.demand_model import DemandModel
from kohya_bucket.planning.options import PlanOptions
from kohya_bucket.planning.plan import BucketCounts
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.ranks import warn_once


@dataclass(frozen=True)
class BucketRow:
    """One bucket of a dataset, for tables.

    `images` may be other items; `samples` and `batches` are those of an epoch on one process; crop losses are shares
    of the resized image.
    """

    bucket: Any
    images: int
    samples: int
    batches: int
    short_batches: int
    mean_crop_loss: float
    worst_crop_loss: float


def bucket_rows(
    buckets: Sequence[Any], bucket: IntArray, losses: npt.NDArray[np.float64], counts: BucketCounts
) -> list[BucketRow]:
    """One for each of K buckets.

    Args:
        bucket: [P] of every image, at every resolution; losses: [P] what is cropped off there.
        counts: [K] what an epoch trains.
    """
    parts = by_bucket(losses, bucket, len(buckets))
    numbers = zip(*(column.tolist() for column in counts[:3]), strict=True)
    return [
        BucketRow(one, len(lost), samples, batches, short, float(np.mean(lost)), float(np.max(lost)))
        for one, lost, (samples, batches, short) in zip(buckets, parts, numbers, strict=True)
    ]


def by_bucket(values: npt.NDArray[Any], bucket: IntArray, count: int) -> list[npt.NDArray[Any]]:
    """[P] values as `count` arrays, by the bucket of each."""
    order = np.argsort(bucket, kind="stable")
    return np.split(values[order], np.searchsorted(bucket[order], np.arange(1, count)))[:count]


OF_RESOLUTIONS = ("resolution_mode", "resolution_weights", "resolution_epochs")


@dataclass(frozen=True)
class PlacedDataset:
    """N images of one dataset, placed.

    Attributes:
        keys: [N] the image keys (paths), in the dataset's order.
        repeats: [N] how often an epoch trains each image.
        placement: their placement, at the first resolution at which they have one; images without a bucket are still
            in it, and are never trained.
        batch_size: images per process and step.
        resolution: (width, height) of the dataset; None where there is no config.
        per_resolution: one placement per resolution where there are several; none otherwise.
        sizes: [N, 2] the images' own sizes; needed where images are trained outside of their bucket.
        of_resolutions: how several resolutions are used: the options of `plan_epoch` in `OF_RESOLUTIONS`.
        no_upscale: whether no image may be trained in a bucket that is larger than its own.
        focus: [N, 4] the rectangle that each image's crop keeps, NaN where it has none; None: the crops are in the
            middle.
        left_out: (position, reason) of the images without a bucket.
    """

    keys: Sequence[str]
    repeats: npt.NDArray[np.int64]
    placement: Placement
    batch_size: int
    resolution: tuple[int, int] | None = None
    per_resolution: tuple[Placement, ...] = ()
    sizes: IntArray | None = None
    of_resolutions: Mapping[str, Any] = field(default_factory=dict)
    no_upscale: bool = False
    focus: FloatArray | None = None
    left_out: tuple[tuple[int, str], ...] = ()

    @property
    def mode(self) -> str | None:
        """How several resolutions are used; None where there is one."""
        return self.of_resolutions.get("resolution_mode")

    @cached_property
    def trained(self) -> PlacedDataset:
        """Those of the images that have a bucket."""
        kept = self.placement.placed
        placements = self.per_resolution if kept.all() else tuple(one.select(kept) for one in self.per_resolution)
        return replace(
            self,
            keys=TextColumn.from_texts([key for key, keep in zip(self.keys, kept.tolist(), strict=True) if keep]),
            repeats=self.repeats[kept],
            placement=first_placed(placements) if placements else self.placement.select(kept),
            per_resolution=placements,
            sizes=None if self.sizes is None else self.sizes[kept],
            focus=None if self.focus is None else self.focus[kept],
            left_out=(),
        )

    @cached_property
    def buckets(self) -> list[tuple[int, int]]:
        """The sizes in use, resolution by resolution, sorted by (width, height)."""
        return [as_pair(size) for values, _ in self._distinct for size in sizes_of_keys(values)]

    @property
    def frames(self) -> list[int]:
        """[K] ones: these are images."""
        return [1] * len(self.buckets)

    @cached_property
    def resolution_of_bucket(self) -> npt.NDArray[np.intp]:
        """[K] resolution that a bucket belongs to."""
        return np.repeat(np.arange(len(self._distinct)), [len(values) for values, _ in self._distinct])

    @property
    def group_of_bucket(self) -> npt.NDArray[np.intp]:
        """The same: nothing moves from one resolution to another."""
        return self.resolution_of_bucket

    @cached_property
    def bucket_ids(self) -> IntArray:
        """[N] int32 position in `buckets`, or [N, R] for R resolutions; -1 without a bucket."""
        ids = np.full((len(self.keys), len(self.placements)), -1, dtype=np.int32)
        first = 0
        for column, (placement, (values, inverse)) in enumerate(zip(self.placements, self._distinct, strict=True)):
            ids[placement.placed, column] = inverse + first
            first += len(values)
        return ids if self.per_resolution else ids[:, 0]

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Their placements, one per resolution, one at least."""
        return self.per_resolution or (self.placement,)

    @cached_property
    def _distinct(self) -> list[tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]]:
        return [np.unique(size_keys(at.bucket_sizes[at.placed]), return_inverse=True) for at in self.placements]

    @cached_property
    def pairs(self) -> tuple[npt.NDArray[np.intp], IntArray]:
        """([P] image, [P] bucket): every bucket of every image, bucket by bucket."""
        ids = self.bucket_ids.reshape(len(self.keys), len(self.placements))
        image, column = np.nonzero(ids >= 0)
        bucket = ids[image, column]
        order = np.argsort(bucket, kind="stable")
        return image[order], bucket[order]

    def placed_at(self, image: int, bucket: int) -> Placement:
        """The placement of one image in any bucket, its own or one that it is moved to."""
        size = self.buckets[bucket]
        placement = self.placements[int(self.resolution_of_bucket[bucket])]
        if placement.bucket_index[image] >= 0 and tuple(placement.bucket_sizes[image].tolist()) == size:
            return placement.select(np.array([image]))
        if self.sizes is None:
            raise ConfigError(f"{self.keys[image]} is to be trained at {size[0]}x{size[1]}, but its size is not known")
        one = slice(image, image + 1)
        return placed_in(size, self.sizes[one], None if self.focus is None else self.focus[one])

    @cached_property
    def samples_per_bucket(self) -> npt.NDArray[np.int64]:
        """[K] trainings asked of the first epoch: images times repeats, each resolution in its turn."""
        options = PlanOptions(repeats=self.repeats, **self.of_resolutions)
        return DemandModel(self.bucket_ids, len(self.buckets), options).for_epoch(0, 1).demand.per_bucket()

    def rows(self, counts: BucketCounts) -> list[BucketRow]:
        """One row per bucket in use, in `buckets` order; `counts` are of the epoch's plan."""
        image, bucket = self.pairs
        losses = np.stack([placement.crop_loss for placement in self.placements])[
            self.resolution_of_bucket[bucket], image
        ]
        return bucket_rows([Bucket(*size) for size in self.buckets], bucket, losses, counts)


@dataclass(frozen=True)
class ItemsInBuckets:
    """N items of one dataset whose buckets are known, each trained at one size.

    Attributes:
        keys: [N] their names.
        repeats: [N] how often an epoch trains each.
        bucket_ids: [N] int32 position of each in `bucket_keys`.
        bucket_keys: [K] width and height, then what else must be equal in a batch.
        frames: [K] frames of a clip, 1 of an image.
        batch_size: items per process and step.
        resolution: (width, height) of the dataset; None where it has none of its own.
    """

    keys: Sequence[str]
    repeats: npt.NDArray[np.int64]
    bucket_ids: IntArray
    bucket_keys: Sequence[tuple[Any, ...]]
    frames: Sequence[int]
    batch_size: int
    resolution: tuple[int, int] | None
    no_upscale: ClassVar[bool] = False

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """[K] (width, height)."""
        return [(int(key[0]), int(key[1])) for key in self.bucket_keys]

    @property
    def pairs(self) -> tuple[npt.NDArray[np.intp], IntArray]:
        """([N] item, [N] bucket)."""
        return np.arange(len(self.keys)), self.bucket_ids

    @property
    def resolution_of_bucket(self) -> npt.NDArray[np.intp]:
        """[K] zeros: there is one resolution."""
        return np.zeros(len(self.bucket_keys), dtype=np.intp)

    @property
    def group_of_bucket(self) -> npt.NDArray[np.intp]:
        """[K] number of what must be equal besides the size: nothing moves from one such group to another."""
        first: dict[tuple[Any, ...], int] = {}
        return np.array([first.setdefault(key[2:], k) for k, key in enumerate(self.bucket_keys)], dtype=np.intp)


@dataclass(frozen=True)
class PlacedItems(ItemsInBuckets):
    """N items of one dataset, with the share of each one's resized picture that is cropped off."""

    crop_loss: npt.NDArray[np.float64]

    @classmethod
    def from_buckets(
        cls, names: Sequence[str], buckets: Sequence[tuple[Any, ...]], times: int, batch_size: int,
        resolution: tuple[int, int], crop_loss: npt.NDArray[np.float64],
    ) -> PlacedItems:  # fmt: skip
        """N items whose buckets are given one by one, with their frames, and with the sizes of control images where
        there are some; each is trained `times` an epoch."""
        bucket_keys = sorted(set(buckets))
        position = {bucket: k for k, bucket in enumerate(bucket_keys)}
        ids = np.array([position[bucket] for bucket in buckets], dtype=np.int32)
        repeats = np.full(len(names), times, dtype=np.int64)
        frames = [(*bucket, 1)[2] for bucket in bucket_keys]
        return cls(names, repeats, ids, bucket_keys, frames, max(batch_size, 1), resolution, crop_loss)

    def rows(self, counts: BucketCounts) -> list[BucketRow]:
        """One for each bucket; `counts` are of the epoch's plan."""
        return bucket_rows(self.bucket_keys, self.bucket_ids, self.crop_loss, counts)


def placed_in(bucket: Size, sizes: IntArray, focus: FloatArray | None) -> Placement:
    """Images of [N, 2] sizes, all in one bucket, with the crops that keep their [N, 4] focus."""
    only = BucketSet.from_dims([bucket])
    return focused(InSet(sizes, only, np.zeros(len(sizes), dtype=np.int32)).placement(), focus)


InBuckets = PlacedDataset | ItemsInBuckets
"""What a plan can be made of."""


def first_placed(placements: tuple[Placement, ...]) -> Placement:
    """Each image's placement at the first resolution at which it has one."""
    if len(placements) == 1:
        return placements[0]
    first = np.argmax(np.stack([placement.placed for placement in placements]), axis=0)
    if any(placement.crops is not None for placement in placements):
        placements = tuple(replace(placement, crops=placement.cuts[:, :2]) for placement in placements)
    names = [field.name for field in fields(Placement) if field.name != "bucket_set"]
    rows: dict[str, Any] = {
        name: np.stack([getattr(placement, name) for placement in placements])[first, np.arange(len(first))]
        for name in names
        if getattr(placements[0], name) is not None
    }
    placed = rows["bucket_index"] >= 0
    rows["bucket_index"] = np.where(placed, 0, -1).astype(np.int32)
    rows["reasons"] = np.where(placed, Reason.PLACED, rows["reasons"]).astype(np.uint8)
    return Placement(None, **rows)


def focus_of(options: AdapterOptions, paths: Sequence[str]) -> FloatArray | None:
    """[N, 4] the focus of each image as `[kohya_bucket] focus` says, NaN where it has none; None where it is not set.

    Images that its file names and that are not there are named, once, as is a file that has a focus of no image.

    Raises:
        ConfigError: the file cannot be read, or a row is not a rectangle.
    """
    if options.focus is None:
        return None
    from kohya_bucket.images.focus_files import read_focus, unfound

    focus, missing = read_focus(options.focus, paths)
    warn_once(unfound(options.focus, focus, missing))
    return focus
