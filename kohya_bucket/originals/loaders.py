"""What other trainers' loaders hand out: which images an epoch trains, leaves out, and repeats.

Restated from their public behaviour, each with the version that was read. `compat_tests/test_other_loaders.py` compares
with the real loaders where a checkout is at hand. Nothing is trained by these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.planning.idle import idle_share

Ids = npt.NDArray[np.int64]
Batches = list[Ids]
Epoch = list[Batches]  # [step][rank] -> rows of images
_Random = np.random.Generator
_T = TypeVar("_T")


@dataclass(frozen=True)
class LoaderRun:
    """Some epochs of one loader, over N images.

    Attributes:
        epochs: how many.
        steps: batches of a rank, on average.
        left_out: trainings that were asked for and that an epoch leaves out, on average.
        never: images that none of the epochs trains.
        repeated: trainings of an epoch beyond those that were asked for, on average.
        idle: share of the ranks' time that is spent waiting, by the pixels of what they train.
    """

    epochs: int
    steps: float
    left_out: float
    never: int
    repeated: float
    idle: float


def run_loader(
    name: str,
    ids: npt.ArrayLike,
    pixels: npt.ArrayLike,
    batch_size: int,
    ranks: int = 1,
    epochs: int = 10,
    seed: int = 0,
    repeats: npt.ArrayLike = 1,
) -> LoaderRun:
    """Let a trainer's loader hand out some epochs.

    Args:
        name: one of `LOADERS`.
        ids: [N] bucket of each image.
        pixels: [K] area of each bucket.
        repeats: [N] how often an epoch is to train each image: the loader has so many entries of it.

    Examples:
        >>> run_loader("onetrainer", [0, 0, 0, 0, 0, 1], [64, 64], batch_size=2).left_out
        2.0
    """
    image = np.repeat(np.arange(len(np.asarray(ids))), np.asarray(repeats, dtype=np.int64))
    bucket, area = np.asarray(ids, dtype=np.int64)[image], np.asarray(pixels, dtype=np.float64)
    rng = np.random.default_rng(seed)
    asked = np.bincount(image)
    times = np.zeros_like(asked)
    left_out = repeated = steps = 0
    costs = []
    for epoch in LOADERS[name].epochs(bucket, batch_size, ranks, epochs, rng):
        rows = [row for step in epoch for row in step]
        seen = np.bincount(image[np.concatenate(rows)] if rows else np.zeros(0, np.int64), minlength=len(asked))
        times += seen
        left_out += int(np.maximum(asked - seen, 0).sum())
        repeated += int(np.maximum(seen - asked, 0).sum())
        steps += len(epoch)
        costs += [[float(area[bucket[row]].sum()) for row in step] for step in epoch]
    never = int(np.count_nonzero(times == 0))
    return LoaderRun(epochs, steps / epochs, left_out / epochs, never, repeated / epochs, idle_share(costs))


def _in_buckets(ids: Ids) -> Batches:
    return [np.flatnonzero(ids == k) for k in np.unique(ids)]


def _cut(rows: Ids, size: int, whole: bool) -> Batches:
    """A bucket's rows as batches; `whole`: without the last one where it is not full."""
    return [rows[i : i + size] for i in range(0, len(rows) - (size - 1 if whole else 0), size)]


def _shuffled(batches: Batches, rng: _Random) -> Batches:
    return [batches[i] for i in rng.permutation(len(batches))]


def _anew(ids: Ids, size: int, rng: _Random, *, whole: bool) -> Batches:
    """All batches, of buckets that are shuffled anew, in a new order."""
    cut = [batch for rows in _in_buckets(ids) for batch in _cut(rng.permutation(rows), size, whole)]
    return _shuffled(cut, rng)


def _dealt(batches: list[_T], ranks: int) -> list[list[_T]]:
    """As accelerate deals batches to ranks: in turn, and the first ones again where the last step lacks some."""
    full = [batches[i % len(batches)] for i in range(-(-len(batches) // ranks) * ranks)] if batches else []
    return [full[i : i + ranks] for i in range(0, len(full), ranks)]


_WORKERS = 8  # sd-scripts' default


def _late_hand_over(ids: Ids, size: int, ranks: int, epochs: int, rng: _Random, *, whole: bool) -> list[Epoch]:
    """Each epoch has new loader workers; the first batch of each is of the order that the run began with."""
    first_order, out = _anew(ids, size, rng, whole=whole), []
    for _ in range(epochs):
        drawn = _dealt(rng.permutation(len(first_order)).tolist(), ranks)
        order = _anew(ids, size, rng, whole=whole)
        late, rest = drawn[:_WORKERS], drawn[_WORKERS:]
        out.append([[of[i] for i in step] for of, steps in ((first_order, late), (order, rest)) for step in steps])
    return out


def _dealt_anew(ids: Ids, size: int, ranks: int, epochs: int, rng: _Random, *, whole: bool) -> list[Epoch]:
    return [_dealt(_anew(ids, size, rng, whole=whole), ranks) for _ in range(epochs)]


def _ai_toolkit(ids: Ids, size: int, ranks: int, epochs: int, rng: _Random) -> list[Epoch]:
    """Batches are cut once and filled with their own images; every rank goes through all of them, in its order."""
    fixed = [np.resize(batch, size) for batch in _anew(ids, size, rng, whole=False)]
    return [[list(step) for step in zip(*(_shuffled(fixed, rng) for _ in range(ranks)), strict=True)]
            for _ in range(epochs)]  # fmt: skip


def _one_trainer(ids: Ids, size: int, ranks: int, epochs: int, rng: _Random) -> list[Epoch]:
    """Steps of one shape, of whole batches for all ranks; what is left over differs in each epoch."""
    return [[np.split(step, ranks) for step in _anew(ids, size * ranks, rng, whole=True)] for _ in range(epochs)]


def _diffusion_pipe(ids: Ids, size: int, ranks: int, epochs: int, rng: _Random) -> list[Epoch]:
    """The same, cut after a shuffle of a constant seed: every epoch leaves out the same images."""
    fixed = _anew(ids, size * ranks, rng, whole=True)
    return [[np.split(step, ranks) for step in _shuffled(fixed, rng)] for _ in range(epochs)]


def _novelai(ids: Ids, size: int, ranks: int, epochs: int, rng: _Random) -> list[Epoch]:
    from kohya_bucket.originals.novelai_epochs import NovelAIEpochs

    seed = int(rng.integers(2**31))
    of_rank = [NovelAIEpochs(ids, size, ranks, rank, seed) for rank in range(ranks)]
    return [
        [[batch.rows for batch in step] for step in zip(*(one.epoch() for one in of_rank), strict=True)]
        for _ in range(epochs)
    ]


@dataclass(frozen=True)
class Loader:
    """A trainer's way to make epochs.

    Attributes:
        does: in words.
        read_at: version that was read.
        epochs: ([N] buckets, batch size, ranks, epochs, random numbers) -> its epochs.
    """

    does: str
    read_at: str
    epochs: Callable[[Ids, int, int, int, _Random], list[Epoch]]


LOADERS: Mapping[str, Loader] = {
    "sd-scripts": Loader("trains short batches; a worker begins with a batch of another order", "c162e90",
                         partial(_late_hand_over, whole=False)),
    "musubi-tuner": Loader("trains short batches; ranks draw theirs apart", "30c658c",
                           partial(_dealt_anew, whole=False)),
    "ai-toolkit": Loader("fills short batches with their own images; every GPU trains all", "27a03a91", _ai_toolkit),
    "anima_lora": Loader("leaves out short batches; workers as in sd-scripts", "0acdb05b",
                         partial(_late_hand_over, whole=True)),
    "onetrainer": Loader("leaves out what fills no step, others in each epoch", "mgds 3a6994a", _one_trainer),
    "diffusion-pipe": Loader("leaves out what fills no step, always the same", "8f83dbf", _diffusion_pipe),
    "diffusers": Loader("leaves out short batches, others in each epoch", "58eb52c", partial(_dealt_anew, whole=True)),
    "NovelAI's program": Loader("moves what fills no batch to one of the base size", "2022", _novelai),
}  # fmt: skip
"""By name of the trainer."""
