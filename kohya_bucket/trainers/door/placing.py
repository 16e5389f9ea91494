"""The images of one data set in their buckets: what `plan` prints and what the adapter trains.

An image has one bucket, or with `resolutions` one for each resolution. Sizes are kept between runs and commands: a
second start opens no image. Large data sets get a `MetadataCache` in the user's cache folder without being asked, and
small ones are read faster than a cache is opened.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets import BucketSet, Placement
from kohya_bucket.buckets.bucket import Bucket
from kohya_bucket.buckets.focus import focused
from kohya_bucket.buckets.placement import Reason
from kohya_bucket.buckets.placing import place
from kohya_bucket.buckets.rule import InSet
from kohya_bucket.buckets.sizes import FloatArray, IntArray, as_pair, size_keys, sizes_of_keys
from kohya_bucket.errors import BucketSettingsError, ConfigError, KohyaBucketError
from kohya_bucket.files import user_cache
from kohya_bucket.images import MetadataCache, read_sizes
from kohya_bucket.images.focus_files import read_focus, unfound
from kohya_bucket.images.metadata_cache import is_metadata_cache
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.sizes import SizeScan
from kohya_bucket.images.text_column import TextColumn
from kohya_bucket.planning.demand_model import DemandModel
from kohya_bucket.planning.options import PlanOptions
from kohya_bucket.planning.plan import BucketCounts
from kohya_bucket.texts import one_line
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, at_resolutions, rule_for, without_effect_on
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.ranks import is_first_process, warn_once

logger = logging.getLogger("kohya_bucket")


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
        BucketRow(one, len(mine), samples, batches, short, float(np.mean(mine)), float(np.max(mine)))
        for one, mine, (samples, batches, short) in zip(buckets, parts, numbers, strict=True)
    ]


def by_bucket(values: npt.NDArray[Any], bucket: IntArray, count: int) -> list[npt.NDArray[Any]]:
    """[P] values as `count` arrays, by the bucket of each."""
    order = np.argsort(bucket, kind="stable")
    return np.split(values[order], np.searchsorted(bucket[order], np.arange(1, count)))[:count]


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
        focus: [N, 4] the rectangle that each image's crop keeps, NaN where it has none; None: the crops are in the
            middle.
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
    focus: FloatArray | None = None

    def trained(self) -> PlacedDataset:
        """Those of the images that have a bucket."""
        kept = self.placement.placed
        columns = self.per_resolution if kept.all() else tuple(column.select(kept) for column in self.per_resolution)
        return replace(
            self,
            keys=TextColumn.of([key for key, keep in zip(self.keys, kept.tolist(), strict=True) if keep]),
            repeats=self.repeats[kept],
            placement=first_placed(columns) if columns else self.placement.select(kept),
            per_resolution=columns,
            sizes=None if self.sizes is None else self.sizes[kept],
            focus=None if self.focus is None else self.focus[kept],
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

    @cached_property
    def bucket_ids(self) -> IntArray:
        """[N] int32 position in `buckets`, or [N, R] for R resolutions; -1 without a bucket."""
        ids = np.full((len(self.keys), len(self._places)), -1, dtype=np.int32)
        first = 0
        for column, (placement, (values, inverse)) in enumerate(zip(self._places, self._distinct, strict=True)):
            ids[placement.placed, column] = inverse + first
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

    def placed_at(self, image: int, bucket: int) -> Placement:
        """The placement of one image in any bucket, its own or one that it is moved to."""
        size = self.buckets[bucket]
        placement = self._places[int(self.resolution_of_bucket[bucket])]
        if placement.bucket_index[image] >= 0 and tuple(placement.bucket_sizes[image].tolist()) == size:
            return placement.select(np.array([image]))
        if self.sizes is None:
            raise ConfigError(f"{self.keys[image]} is to be trained at {size[0]}x{size[1]}, but its size is not known")
        only = BucketSet.from_dims([size])
        moved = InSet(self.sizes[image : image + 1], only, np.zeros(1, dtype=np.int32)).placement()
        return focused(moved, None if self.focus is None else self.focus[image : image + 1])

    @cached_property
    def samples_per_bucket(self) -> npt.NDArray[np.int64]:
        """[K] trainings asked of the first epoch: images times repeats, each resolution in its turn."""
        options = PlanOptions(repeats=self.repeats, resolution_mode=self.mode, resolution_weights=self.weights)
        return DemandModel(self.bucket_ids, len(self.buckets), options).for_epoch(0, 1).demand.per_bucket()

    def rows(self, counts: BucketCounts) -> list[BucketRow]:
        """One row per bucket in use, in `buckets` order; `counts` are of the epoch's plan."""
        image, bucket = self.pairs
        losses = np.stack([placement.crop_loss for placement in self._places])[self.resolution_of_bucket[bucket], image]
        return bucket_rows([Bucket(*size) for size in self.buckets], bucket, losses, counts)


@dataclass(frozen=True)
class ItemsInBuckets:
    """N items of one data set whose buckets are known, each trained at one size.

    Attributes:
        keys: [N] their names.
        repeats: [N] how often an epoch trains each.
        bucket_ids: [N] int32 position of each in `bucket_keys`.
        bucket_keys: [K] width and height, then what else must be equal in a batch.
        frames: [K] frames of a clip, 1 of an image.
        batch_size: items per process and step.
    """

    keys: Sequence[str]
    repeats: npt.NDArray[np.int64]
    bucket_ids: IntArray
    bucket_keys: Sequence[tuple[Any, ...]]
    frames: Sequence[int]
    batch_size: int
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


InBuckets = PlacedDataset | ItemsInBuckets
"""What a plan can be made of."""


def refuse_conflicts(keys: DatasetKeys, options: AdapterOptions, *, own_sizes: bool = False) -> None:
    """Refuse options that a dataset's own keys rule out.

    With `own_sizes`, its metadata prescribes the bucket of each image, and comes with latents of that size.

    Raises:
        ConfigError, BucketSettingsError: with what to change.
    """
    if options.focus and (own_sizes or not keys.enable_bucket):
        why = "this dataset's metadata comes with finished latents" if own_sizes else "enable_bucket is off"
        remedy = "train from the images" if own_sizes else "set enable_bucket = true"
        raise ConfigError(f"[kohya_bucket] focus is set, but {why}, so that no crop can be moved: {remedy}, or leave "
                          "focus out")  # fmt: skip
    moved_by = [(f"{name} = {policy.name!r}", policy) for name, policy in options.moving.items()]
    moving = moved_by[0][0] if moved_by else ""
    if options.resolutions and not keys.enable_bucket:
        raise ConfigError(
            "[kohya_bucket] resolutions is set, but enable_bucket is off: a dataset without buckets has one size; "
            "set enable_bucket = true, or leave resolutions out"
        )
    if own_sizes and (options.resolutions or moving):
        raise ConfigError(
            f"[kohya_bucket] {moving or 'resolutions'} trains images at other sizes, but this dataset's metadata "
            "sets the size of each image and comes with finished latents: leave it out, or train from the images"
        )
    if keys.enable_bucket and keys.bucket_no_upscale:
        for option, policy in moved_by:
            if policy.enlarges:
                raise ConfigError(
                    f"[kohya_bucket] {option} would enlarge images to the base size, which bucket_no_upscale "
                    "forbids: use 'merge' or 'keep', or leave bucket_no_upscale out"
                )


def place_all(
    keys: DatasetKeys, options: AdapterOptions, sizes: IntArray, prescribed: Callable[[Any], Placement] | None = None,
    focus: FloatArray | None = None,
) -> tuple[Placement, ...]:  # fmt: skip
    """The placements of a dataset's images: one, or with `resolutions` one per resolution.

    Where an image gets the same bucket at two resolutions (with `bucket_no_upscale`, small images do), it has it at
    the first and none at the other: `all` does not train it twice at one size.

    Args:
        sizes: [N, 2] (width, height); (0, 0) where unreadable.
        prescribed: in place of the rule that keys and options ask for, where there is one resolution.
        focus: [N, 4] what crops must keep, see `buckets/focus.py`.

    Raises:
        ConfigError, BucketSettingsError: what `rule_for` refuses, with the resolution.
    """
    if not options.resolutions:
        if prescribed is not None:  # with metadata's buckets, a focus is refused
            return (prescribed(sizes),)
        return (place(rule_for(keys, options, sizes), sizes, focus),)
    columns: list[Placement] = []
    for one in at_resolutions(keys, options):
        try:
            placement = place(rule_for(one, options, sizes), sizes, focus)
        except (BucketSettingsError, ConfigError) as error:
            width, height = one.resolution
            raise type(error)(f"[kohya_bucket] resolutions, {width}x{height}: {error}") from error
        columns.append(placement)
    return each_once(columns)


def each_once(columns: Sequence[Placement]) -> tuple[Placement, ...]:
    """Placements of the same images at several resolutions; an image has the same bucket at the first of them only."""
    out: list[Placement] = []
    for placement in columns:
        again = np.zeros(len(placement), dtype=np.bool_)
        for earlier in out:
            again |= earlier.placed & (earlier.bucket_sizes == placement.bucket_sizes).all(axis=1)
        out.append(replace(placement, bucket_index=np.where(again, -1, placement.bucket_index).astype(np.int32)))
    return tuple(out)


@dataclass(frozen=True)
class Placing:
    """What became of N images.

    Attributes:
        per_resolution: their placements, one per resolution; images without a bucket are still in them.
        placement: each at the first resolution at which it has a bucket.
        every: all of them in their buckets, and trained: the M that have one.
        kept: [N] whether an image is among them.
        left_out: (position, reason) of the others.
    """

    per_resolution: tuple[Placement, ...]
    placement: Placement
    every: PlacedDataset
    trained: PlacedDataset
    kept: npt.NDArray[np.bool_]
    left_out: tuple[tuple[int, str], ...]


def place_images(
    names: Sequence[str], sizes: IntArray, repeats: npt.NDArray[np.int64], batch_size: int, keys: DatasetKeys,
    options: AdapterOptions, *, paths: Sequence[str] | None = None, unreadable: Mapping[int, str] | None = None,
    prescribed: Callable[[Any], Placement] | None = None,
) -> Placing:  # fmt: skip
    """Give every image of a data set its bucket: training, plans and caches all do it here.

    Args:
        names: [N] image keys.
        sizes: [N, 2] (width, height); (0, 0) where unreadable.
        repeats: [N] how often an epoch trains each.
        paths: [N] their files, by which a focus is found; None: the keys.
        unreadable: why a file could not be read, by position.
        prescribed: places the images where the data set's metadata says in which buckets.

    Raises:
        ConfigError, BucketSettingsError: options that exclude each other, or from which no buckets follow.
    """
    refuse_conflicts(keys, options, own_sizes=prescribed is not None)
    warn_once(without_effect_on(keys, options, own_sizes=prescribed is not None))
    focus = focus_of(options, names if paths is None else paths)
    columns = place_all(keys, options, sizes, prescribed, focus)
    placement = first_placed(columns)
    kept = placement.placed
    left_out = tuple(
        (i, (unreadable or {}).get(i) or f"{sizes[i][0]}x{sizes[i][1]}: {placement.reason(i).text}")
        for i in np.flatnonzero(~kept).tolist()
    )
    several = options.resolutions is not None
    every = PlacedDataset(
        names,
        repeats,
        placement,
        batch_size,
        per_resolution=columns if several else (),
        sizes=sizes if options.several_sizes else None,
        mode=options.resolution_mode if several else None,
        weights=options.resolution_weights if several else None,
        no_upscale=bool(keys.enable_bucket and keys.bucket_no_upscale),
        focus=focus,
    )
    return Placing(columns, placement, every, every.trained(), kept, left_out)


def focus_of(options: AdapterOptions, paths: Sequence[str]) -> FloatArray | None:
    """[N, 4] the focus of each image as `[kohya_bucket] focus` says, NaN where it has none; None where it is not set.

    Images that its file names and that are not there are named, once, as is a file that has a focus of no image.

    Raises:
        ConfigError: the file cannot be read, or a row is no rectangle.
    """
    if options.focus is None:
        return None
    focus, missing = read_focus(options.focus, paths)
    warn_once(unfound(options.focus, focus, missing))
    return focus


def refuse_unmatched(options: AdapterOptions, found: Sequence[FloatArray | None]) -> None:
    """Refuse a focus that no image of any data set has: its file is of other images, or names them otherwise.

    Args:
        found: what `focus_of` gives of each data set.

    Raises:
        ConfigError: with the folder that names are relative to.
    """
    known = [focus for focus in found if focus is not None and len(focus)]
    if options.focus is not None and known and np.isnan(np.concatenate(known)).all():
        said = unfound(options.focus, np.concatenate(known), ())
        raise ConfigError(f"[kohya_bucket] {said}: correct the names, or leave focus out")


def first_placed(columns: tuple[Placement, ...]) -> Placement:
    """Each image's placement at the first resolution at which it has one."""
    if len(columns) == 1:
        return columns[0]
    which = np.argmax(np.stack([column.placed for column in columns]), axis=0)
    if any(column.crops is not None for column in columns):
        columns = tuple(replace(column, crops=column.cuts[:, :2]) for column in columns)
    names = [field.name for field in fields(Placement) if field.name != "bucket_set"]
    rows: dict[str, Any] = {
        name: np.stack([getattr(column, name) for column in columns])[which, np.arange(len(which))]
        for name in names
        if getattr(columns[0], name) is not None
    }
    placed = rows["bucket_index"] >= 0
    rows["bucket_index"] = np.where(placed, 0, -1).astype(np.int32)
    rows["reasons"] = np.where(placed, Reason.PLACED, rows["reasons"]).astype(np.uint8)
    return Placement(None, **rows)


AUTOMATIC_FROM = 5_000


def scan_sizes(paths: Sequence[str], setting: str = "auto", progress: Progress | None = None) -> SizeScan:
    """Sizes of N files.

    Args:
        setting: `auto`, `off`, or the path of a cache file to keep (Parquet).
    """
    file = cache_file(paths, setting)
    if file is None:
        return read_sizes(paths, progress=progress)
    cache, writable = None, True
    try:
        cache = MetadataCache.load(file) if file.is_file() else None
    except KohyaBucketError as error:
        writable = setting == "auto" or file.stat().st_size == 0 or is_metadata_cache(str(file))
        then = "it is created again" if writable else "it stays as it is, and no sizes are kept"
        logger.warning("%s; %s", one_line(error), then)
    fresh = MetadataCache.build(paths, progress=progress) if cache is None else cache.refresh(paths, progress=progress)
    changes = fresh.changes
    changed = cache is None or changes is None or bool(changes.reread or changes.added)
    if changed and writable and is_first_process():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            (fresh if cache is None else _with_others(fresh, cache)).save(file)
            logger.info("image sizes kept in %s", one_line(file))
        except (KohyaBucketError, OSError) as error:
            logger.warning("image sizes could not be kept: %s", one_line(error))
    return fresh.scan()


def _with_others(fresh: MetadataCache, before: MetadataCache) -> MetadataCache:
    """The rows, and those of other files that are still there: data sets of one config may share a file."""
    if fresh.changes is None or not fresh.changes.dropped:
        return fresh
    others = np.flatnonzero(fresh.paths.find(list(before.paths)) < 0)
    there = [i for i in others.tolist() if os.path.exists(before.paths[i])]  # noqa: PTH110
    keep = np.zeros(len(before), dtype=np.bool_)
    keep[there] = True
    return fresh.joined(before.where(keep))


def cache_file(paths: Sequence[str], setting: str) -> Path | None:
    """Where the sizes of `paths` are kept; None where they are not."""
    if setting == "off":
        return None
    if setting != "auto":
        return Path(setting)
    if len(paths) < AUTOMATIC_FROM or importlib.util.find_spec("pyarrow") is None:
        return None
    folders = sorted({os.path.abspath(folder) for folder in {os.path.dirname(path) for path in paths}})  # noqa: PTH100, PTH120
    name = hashlib.sha256("\n".join(folders).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return user_cache() / "sizes" / f"{name}.parquet"
