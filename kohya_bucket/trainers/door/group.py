"""One plan for all datasets of a group: each batch is of one bucket of one of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import ConfigError
from kohya_bucket.latents.token_grids import TOKEN_GRIDS
from kohya_bucket.planning import EpochPlanner
from kohya_bucket.planning.fingerprint import NAMES, digest_of, digest_of_names
from kohya_bucket.planning.idle import dealt_costs, idle_share, idle_share_of
from kohya_bucket.planning.options import EpochOptions
from kohya_bucket.planning.plan import BucketCounts, EpochPlan, rank_costs
from kohya_bucket.planning.planner import never_full, never_trained
from kohya_bucket.texts import counted, some
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import InBuckets, PlacedDataset


class GroupPlanner:
    """Plans the datasets of one group.

    Args:
        images: one entry per dataset, in the group's order.
        shards: [N] number of the shard that each image's latent lies in; None: not known yet. An order that goes by
            shards is then planned as `shuffled`, whose steps are as many and as large.

    Raises:
        ConfigError: a schedule that goes by the datasets, of which another number of resolutions is there.
    """

    def __init__(self, images: Sequence[InBuckets], options: AdapterOptions, shards: IntArray | None = None) -> None:
        self.options = options
        self._planners: dict[int, EpochPlanner] = {}
        # How an epoch is arranged.
        self._of_epochs, self._shards = options.of_epochs(), shards
        if options.arrangement.uses_shards and shards is None:
            self._of_epochs |= {"order": "shuffled", "open_shards": EpochOptions.open_shards, "step_shapes": "one"}
        if options.by_datasets:
            self._of_epochs["stages"] = np.repeat(_stages(images, options), [len(one.keys) for one in images])
        # [N] of the images: images and buckets are numbered on from dataset to dataset, so a bucket is of one of them.
        self._keys = [one.keys for one in images]
        self._focus = [focus for one in images if (focus := getattr(one, "focus", None)) is not None]
        self.repeats = np.concatenate([one.repeats for one in images])
        buckets_of = [len(one.buckets) for one in images]
        self.first_image = np.cumsum([0, *(len(one.keys) for one in images)])
        self.first_bucket = np.cumsum([0, *buckets_of])
        numbered = zip((one.bucket_ids for one in images), self.first_bucket, strict=False)
        self.bucket_ids = np.concatenate([np.where(ids < 0, -1, ids + n) for ids, n in numbered]).astype(np.int32)
        # [K] of the buckets.
        self._no_upscale = np.repeat([one.no_upscale for one in images], buckets_of)
        self.bucket_sizes = np.array([size for one in images for size in one.buckets], dtype=np.int32).reshape(-1, 2)
        # Nothing moves from one dataset to another, nor from one resolution, length or layout to another.
        most_groups = max([1, *(int(one.group_of_bucket.max(initial=0)) + 1 for one in images)])
        self.bucket_groups = np.concatenate(
            [number * most_groups + one.group_of_bucket for number, one in enumerate(images)]
        ).astype(np.int64)
        self.batch_sizes = np.repeat([one.batch_size for one in images], buckets_of)
        self.frames = [n for one in images for n in one.frames]
        self._bucket_keys = [key for one in images for key in getattr(one, "bucket_keys", one.buckets)]
        if options.model is None:  # pixels, of one frame in four, as in the latents of most video models
            pixels = self.bucket_sizes.astype(np.int64).prod(axis=1)
            self._tokens = pixels * ((np.array(self.frames, dtype=np.int64) + 3) // 4)
        else:
            self._tokens = TOKEN_GRIDS[options.model].tokens(self.bucket_sizes, self.frames)

    def planner(self, world_size: int) -> EpochPlanner:
        """What plans any epoch for a number of processes."""
        options = self.options
        if world_size not in self._planners:
            self._planners[world_size] = EpochPlanner(
                self.bucket_ids,
                None if options.has_budget else self.batch_sizes,
                world_size=world_size,
                first_epoch=1,  # epoch 0 is that of validation
                repeats=self.repeats,
                bucket_sizes=self.bucket_sizes,
                bucket_groups=self.bucket_groups,
                bucket_tokens=self._tokens,
                token_cost=options.token_cost,
                no_upscale=self._no_upscale,
                shards=self._shards,
                equal_epochs=True,
                **self._of_epochs,
            )
        return self._planners[world_size]

    def counts(self, plan: EpochPlan | None = None) -> list[BucketCounts]:
        """What an epoch trains of the buckets of each dataset; by default on one process."""
        every = (plan or self.planner(1).plan(0, 1)).per_bucket()
        ends = itertools.pairwise(self.first_bucket.tolist())
        return [BucketCounts(*(column[begin:end] for column in every)) for begin, end in ends]

    def contents(self, what: str) -> str:
        """How much there is to train, for the log."""
        buckets, trainings = counted(len(self.bucket_sizes), "bucket"), counted(int(self.repeats.sum()), "training")
        return f"{counted(len(self.repeats), what)} in {buckets}, {trainings} an epoch"

    def dataset_of(self, bucket: int) -> int:
        """Which dataset of the group a bucket belongs to."""
        return int(np.searchsorted(self.first_bucket, bucket, side="right")) - 1

    def name_of(self, image: int) -> str:
        """File name of an image of the plan."""
        dataset = int(np.searchsorted(self.first_image, image, side="right")) - 1
        return os.path.basename(self._keys[dataset][image - int(self.first_image[dataset])])  # noqa: PTH119

    def fingerprint(self, world_size: int) -> dict[str, Any]:
        """What decides a group's plans, as plain values; the folder that the images lie in does not."""
        own = {NAMES: self._digest_of_names, "max_pixels": self.options.max_pixels}
        return {**self.planner(world_size).fingerprint, **own}

    @cached_property
    def focus(self) -> str | None:
        """Digest of what crops keep; None where no focus is set. It changes pictures, and no plan."""
        return digest_of(np.concatenate(self._focus)) if self._focus else None

    def image_names(self) -> list[str]:
        """[N] the keys of all datasets' images, one dataset after another."""
        return [key for keys in self._keys for key in keys]

    @cached_property
    def _digest_of_names(self) -> str:
        return digest_of_names(self.image_names())

    @cached_property
    def shape_of_bucket(self) -> IntArray:
        """[K] numbers that are equal where buckets are of one shape, also in other datasets."""
        shapes = [(*key, frames) for key, frames in zip(self._bucket_keys, self.frames, strict=True)]
        numbers = {shape: k for k, shape in enumerate(shapes)}
        return np.array([numbers[shape] for shape in shapes], dtype=np.int32)


def _stages(images: Sequence[InBuckets], options: AdapterOptions) -> list[int]:
    """Which stage of the schedule each dataset is of: the resolutions in their order."""
    resolutions = list(dict.fromkeys(one.resolution for one in images))
    stages = list(options.resolution_epochs or ())
    if len(resolutions) != len(stages) + 1:
        sizes = [f"{one[0]}x{one[1]}" for one in resolutions if one is not None]
        have = f"{counted(len(sizes), 'resolution')} ({some(sizes, _SHOWN)})" if sizes else "none of their own"
        raise ConfigError(
            f"[kohya_bucket] resolution_epochs = {stages} trains datasets of {len(stages) + 1} resolutions one after "
            f"another, but they have {have}: give each resolution its datasets, or change resolution_epochs"
        )
    return [resolutions.index(one.resolution) for one in images]


def moved_images(
    images: PlacedDataset, options: AdapterOptions, world_sizes: Iterable[int]
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32]]:
    """([M] image, [M] bucket): what `merge` and `catch_all` may train elsewhere, image and size once each.

    Sizes at which an image is trained anyway, with several resolutions, are not among them. `world_sizes` are numbers
    of processes to train with; they only count with step_shapes="one".
    """
    image, bucket = images.pairs
    planner = GroupPlanner([images], options.unscheduled())
    ranks = set(world_sizes) if options.one_shape else {1}
    pairs = sorted({pair for n in ranks for pair in planner.planner(n).moved_pairs()})
    if not pairs:
        return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.int32)
    asked = [image[bucket == source] for source, _ in pairs]
    moved = np.concatenate(asked)
    target = np.repeat(np.array([target for _, target in pairs], dtype=np.int32), [len(rows) for rows in asked])
    sizes = np.array(images.buckets, dtype=np.int64)
    _, size_number = np.unique(sizes, axis=0, return_inverse=True)
    size_number = size_number.reshape(-1)  # numpy 2.0 gives it another shape
    keys, first = np.unique(moved * len(sizes) + size_number[target], return_index=True)
    at = first[~np.isin(keys, image * len(sizes) + size_number[bucket])]
    return moved[at], target[at]


# What an epoch is on several GPUs: steps, waiting, repeats, and images that fill no batch.

_SHOWN = 5


def splits_of_stages(group: GroupPlanner, world_size: int) -> str:
    """A line where a stage of a schedule trains smaller batches than it could; empty where there is none."""
    steps = group.planner(world_size).steps_alone() if group.options.resolution_epochs else [0]
    if 4 * min(steps) >= 3 * max(steps):
        return ""
    return (
        f"all epochs have {max(steps):,} steps, since a trainer asks for their number once: with whole batches those "
        f"of the stages would have {', '.join(f'{n:,}' for n in steps)}, and the shorter ones split theirs"
    )


def left_over(group: GroupPlanner, world_size: int) -> tuple[tuple[str, ...], str]:
    """What becomes of buckets that a remainder policy would leave out whole, on so many processes.

    Returns the file names of the images that no epoch trains, and a line for logs and tables; empty where every bucket
    fills a batch, or nothing is left out.
    """
    planner = group.planner(world_size)
    small = never_full(planner) if planner.options.policy.leaves_out else ()
    if not len(small):
        return (), ""
    together = counted(1 if planner.options.by_cost else world_size, "process")
    buckets = np.unique(group.bucket_sizes[small], axis=0).tolist()
    where = some([f"{width}x{height}" for width, height in buckets], _SHOWN)
    policy, remainder = planner.options.policies[-1], group.options.remainder
    if policy.leaves_out:
        names = tuple(group.name_of(image) for image in never_trained(planner).tolist())
        count = counted(len(names), "image", "is", "are")
        return names, (
            f"{count} never trained ({some(names, _SHOWN)}): what {where} hold fills no batch of {together}, and "
            f"small_buckets = '{policy.name}'; small_buckets = 'keep' trains them"
        )
    images = np.isin(planner.demand_model.ids, small)
    held = int(np.count_nonzero(images if images.ndim == 1 else images.any(axis=1)))
    return (), (
        f"{counted(held, 'image')} in buckets that fill no batch of {together} ({where}), which remainder = "
        f"'{remainder}' would never train: small_buckets = '{policy.name}' {policy.text}"
    )


def no_batch(left_over: str) -> str:
    """What ends a training of which nothing but what is left over is left."""
    return f"no batch is left to train: {left_over}"


@dataclass(frozen=True)
class GpuRow:
    """An epoch on a number of GPUs.

    Attributes:
        steps: batches that each GPU trains; updates: changes of the weights, fewer with accumulation.
        samples: trainings by all GPUs together.
        missed, repeated, moved: trainings other than asked, or in another bucket; `ledger` says it in words.
        idle: predicted share of the GPUs' time spent waiting for the one with the most to do.
        left_over: what becomes of buckets that never fill a batch, in words, and whether a stage splits batches;
            `never_trained` names the images that no epoch trains.
        idle_independent: the same if every GPU drew batches of its own, as trainers do alone.
        largest: the batch of one GPU that costs most: `4 of 1024x1024`.
        shape_changes: how often a GPU's batch has another shape or number of images than the one before it, on the GPU
            where that is most often.
        epochs: which ones, `1 to 4`, where resolutions follow a schedule; else "".
    """

    gpus: int
    steps: int
    updates: int
    samples: int
    missed: int
    repeated: int
    moved: int
    idle: float
    idle_independent: float
    ledger: str
    left_over: str
    never_trained: tuple[str, ...]
    largest: str
    shape_changes: int
    epochs: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if name != "epochs" or value}


def _largest(group: GroupPlanner, plan: EpochPlan) -> str:
    costs = rank_costs(plan)
    if not costs.size:
        return ""
    step, rank = np.unravel_index(int(np.argmax(costs)), costs.shape)
    bucket = int(plan.rank_buckets(int(rank))[step])
    frames = group.frames[bucket]
    size = "x".join(map(str, [*group.bucket_sizes[bucket].tolist(), *[frames] * (frames > 1)]))
    return f"{int(plan.rank_lengths(int(rank))[step])} of {size}"


def _shape_changes(group: GroupPlanner, plan: EpochPlan) -> int:
    ranks, numbers = range(plan.world_size), group.shape_of_bucket
    shapes = [(numbers[plan.rank_buckets(rank)], plan.rank_lengths(rank)) for rank in ranks]
    return int((np.diff(shapes) != 0).any(axis=1).sum(axis=1).max())


def epoch_of(
    images: Sequence[InBuckets], options: AdapterOptions, gpus: Sequence[int], accumulate: int
) -> tuple[list[BucketCounts], tuple[GpuRow, ...]]:
    """Plan an epoch of some datasets; `accumulate` batches make one update.

    Returns what it trains of the buckets of each dataset on one GPU, and what it is on each number of GPUs. Of a
    schedule of resolutions it is an epoch of each stage, and their sum.
    """
    if not any(len(one.keys) for one in images):
        return [BucketCounts(*np.zeros((5, 0), dtype=np.int64)) for _ in images], ()
    planner = GroupPlanner(images, options)
    starts = [1]
    if options.resolution_epochs is not None:
        starts = np.cumsum([1, *options.resolution_epochs]).tolist()
    rows: list[GpuRow] = []
    stages = []
    for start, end in itertools.zip_longest(starts, starts[1:]):
        name = "" if len(starts) == 1 else f"from {start}" if end is None else _numbers(start, end - 1)
        alone = planner.planner(1).plan(0, start)
        stages.append(planner.counts(alone))
        rows += _rows(planner, alone, gpus, accumulate, name)
    return [_together(of_one) for of_one in zip(*stages, strict=True)], tuple(rows)


def _numbers(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _together(stages: Sequence[BucketCounts]) -> BucketCounts:
    """What several epochs train of the same buckets, of which nearly each is trained in one of them."""
    samples, batches, short = (np.sum([one[k] for one in stages], axis=0) for k in range(3))
    smallest = np.min([np.where(one.samples > 0, one.smallest, np.iinfo(np.int64).max) for one in stages], axis=0)
    return BucketCounts(samples, batches, short, np.where(samples > 0, smallest, 0), stages[0].full)


def _rows(group: GroupPlanner, alone: EpochPlan, gpus: Sequence[int], accumulate: int, name: str) -> list[GpuRow]:
    """An epoch, planned for one GPU, on each number of them."""
    rows = []
    for n in gpus:
        plan = group.planner(n).plan(0, alone.epoch)
        ledger, (never, line), split = plan.ledger(), left_over(group, n), splits_of_stages(group, n)
        rows.append(
            GpuRow(
                n, plan.steps, -(-plan.steps // accumulate), plan.samples, ledger.missed, ledger.repeated, ledger.moved,
                idle_share_of(plan), idle_share(dealt_costs(alone, n)), ledger.text,
                "; ".join(filter(None, (line, split))), never, _largest(group, plan), _shape_changes(group, plan),
                name,
            )
        )  # fmt: skip
    return rows
