"""Other trainers' real loaders against what is restated of them: which images an epoch trains, leaves out, repeats.

Each test needs a checkout in the variable it names, as in test_other_trainers.py. What decides is taken out of its file
and run. sd-scripts' loader is compared in test_sdscripts_epochs.py, ai-toolkit's in test_ai_toolkit.py, NovelAI's
batches in test_novelai_cases.py.
"""

import random
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from test_other_trainers import source, take

from kohya_bucket.originals.loaders import run_loader

RNG = np.random.default_rng(8)
IDS = np.concatenate([RNG.integers(0, 9, 150), np.repeat(np.arange(9, 20), 3), np.repeat(np.arange(20, 30), 2)])
PIXELS = np.full(30, 64 * 64)
EPOCHS = 10


def facts(epochs: list[list[int]]) -> tuple[float, int, float]:
    """Left out, never trained, and repeated, of what epochs trained."""
    counted = [Counter(epoch) for epoch in epochs]
    left_out = sum(len(IDS) - len(one) for one in counted) / len(epochs)
    never = len(IDS) - len({i for one in counted for i in one})
    return left_out, never, sum(sum(one.values()) - len(one) for one in counted) / len(epochs)


def restated(name: str, batch_size: int, ranks: int = 1) -> tuple[float, int, float]:
    run = run_loader(name, IDS, PIXELS, batch_size, ranks, EPOCHS)
    return run.left_out, run.never, run.repeated


@pytest.mark.parametrize("batch_size", [2, 4, 7])
def test_one_trainer(batch_size):
    file = source("MGDS_DIR", "src/mgds/pipelineModules/AspectBatchSorting.py")
    base = type("Base", (), {"__init__": lambda _: None})
    taken = take(file, {"AspectBatchSorting"}, PipelineModule=base, tqdm=iter,
                 SingleVariationRandomAccessPipelineModule=type("Mixin", (), {}))  # fmt: skip
    module = taken.AspectBatchSorting("resolution", [], batch_size)
    module.bucket_dict = {k: np.flatnonzero(k == IDS).tolist() for k in range(30)}
    module.current_variation = 0
    module._get_rand = lambda _: random
    random.seed(1)
    real = facts([module._AspectBatchSorting__shuffle() for _ in range(EPOCHS)])
    assert real == restated("onetrainer", batch_size)


@pytest.mark.parametrize(("batch_size", "ranks"), [(4, 1), (2, 2), (3, 3)])
def test_diffusion_pipe(batch_size, ranks):
    file = source("DIFFUSION_PIPE_DIR", "utils/dataset.py")
    taken = take(file, {"ConcatenatedBatchedDataset", "shuffle_with_seed"}, random=random,
                 is_main_process=lambda: True, logger=SimpleNamespace(warning=lambda _: None))  # fmt: skip

    class OfOneSize:
        size_bucket = (64, 64, 1)

        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        def __getitem__(self, i):
            return int(self.rows[i])

    whole = {None: batch_size * ranks}
    epoch = []
    for k in range(30):
        for rank in range(ranks):
            data = taken.ConcatenatedBatchedDataset([OfOneSize(np.flatnonzero(k == IDS))])
            data.post_init(whole, whole, rank, ranks)
            epoch += [i for step in range(len(data)) for i in data[step]]
    assert facts([epoch] * EPOCHS) == restated("diffusion-pipe", batch_size, ranks)


@pytest.mark.parametrize("batch_size", [2, 4, 7])
def test_diffusers(batch_size):
    file = source("DIFFUSERS_DIR", "examples/dreambooth/train_dreambooth_lora_flux2.py")
    taken = take(file, {"BucketBatchSampler"}, BatchSampler=object, DreamBoothDataset=object, random=random)
    data = SimpleNamespace(buckets=range(30), pixel_values=[(None, int(k)) for k in IDS])
    sampler = taken.BucketBatchSampler(data, batch_size, drop_last=True, seed=3)
    assert facts([[i for batch in sampler for i in batch] for _ in range(EPOCHS)]) == restated("diffusers", batch_size)
