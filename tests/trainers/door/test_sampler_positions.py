"""Where the sampler behind sd-scripts' loader goes on after stops, whatever the batch size and the options."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.planning import EpochPosition
from kohya_bucket.planning.fingerprint import RanksDifferError
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placing import place_images
from kohya_bucket.trainers.door.sampler import PlanSampler

IMAGES = 60
SIZES = np.random.RandomState(0).randint(200, 900, (IMAGES, 2)).astype(np.int32)
NAMES = [f"{i}.png" for i in range(IMAGES)]
KEYS = DatasetKeys((256, 256), True, 64, 1024)
TABLES = [
    {},
    {"remainder": "merge", "merge_max_crop": 0.5},
    {"remainder": "catch_all"},
    {"resolutions": [256, 384], "resolution_mode": "rotate"},
    {"resolutions": [256, 384], "resolution_mode": "rotate", "remainder": "catch_all"},
    {"resolutions": [256, 384], "resolution_mode": "schedule", "resolution_epochs": [1]},
]


def sampler_of(table, batch_size, epoch=1, seed=5, names=NAMES):
    options = AdapterOptions.from_tables(("here", table))
    images = place_images(names, SIZES, np.ones(IMAGES, dtype=int), batch_size, KEYS, options).trained
    return PlanSampler(GroupPlanner([images], options), seed, SimpleNamespace(value=epoch))


@pytest.mark.long
@given(st.sampled_from(TABLES), st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=4))
def test_stopped_again_and_again_an_epoch_trains_each_image_once(table, stops):
    """Each stop saves what the trainer counts: accelerator steps, which begin at what `on_start` says."""
    seen: Counter[int] = Counter()
    position = None
    for batch_size, steps in [*stops, (3, 10**6)]:
        sampler, begun = sampler_of(table, batch_size), []
        sampler.on_start = begun.append
        if position is not None:
            sampler.resume(position)
        batches, trained = iter(sampler), 0
        if sampler.epoch == 2:
            break  # the epoch was complete
        for batch in batches:
            seen.update(batch.images.tolist())
            trained += 1
            if trained == steps:
                break
        position = sampler.position(begun[0] + trained)
    assert seen == dict.fromkeys(range(IMAGES), 1)


@pytest.mark.parametrize("order", ["shuffled", "runs", "sorted"])
def test_a_run_begins_with_its_costliest_batch_unless_that_is_left_out(order):
    def batches(epoch, seed, **table):
        sampler = sampler_of({"order": order, **table}, 4, epoch, seed)
        costs = sampler.planner.bucket_sizes.prod(axis=1)
        return [(len(batch.images) * int(costs[batch.bucket]), batch.images.tolist()) for batch in sampler]

    moved = 0
    for seed in range(6):
        usual, first = batches(1, seed, largest_first=False), batches(1, seed)
        assert first[0][0] == max(usual)[0]
        assert first[1:] == [batch for batch in usual if batch != first[0]]
        moved += first != usual
        for epoch in (0, 2):  # those of validation, and later ones
            assert batches(epoch, seed) == batches(epoch, seed, largest_first=False)
    assert moved


@pytest.mark.parametrize("stop_at", [1, 4, 10**6])
@pytest.mark.parametrize("worlds", [(3, 3), (4, 2), (2, 5), (8, 1)])
def test_equal_costs_are_resumed_on_any_number_of_processes(monkeypatch, worlds, stop_at):
    """Each image once by what counts in the loss; each batch of one bucket; and a state that JSON can hold."""
    monkeypatch.setattr("kohya_bucket.trainers.door.sampler.gather", lambda mine: [mine])
    counted, position, mixed = np.zeros(IMAGES), None, 0
    for world, steps in zip(worlds, (stop_at, 10**6), strict=True):
        monkeypatch.setattr("kohya_bucket.trainers.door.sampler.world", lambda world=world: (world, 0))
        sampler = sampler_of({"step_shapes": "equal_cost"}, 3)
        if position is not None:
            state = json.loads(json.dumps(position.state_dict(sampler.fingerprint)))
            sampler.resume(EpochPosition.from_state_dict(state, sampler.fingerprint))
        if sampler._rest is not None and sampler._rest.epoch == 2:
            break  # the epoch was complete
        batches = list(sampler)[: steps * world]
        assert len(batches) % world == 0
        for first in range(0, len(batches), world):
            step = batches[first : first + world]
            mixed += len({batch.bucket for batch in step}) > 1
            weights = [batch.loss_scale / len(batch.images) / world for batch in step]
            for batch, weight in zip(step, weights, strict=True):
                assert set(sampler.planner.bucket_ids[batch.images]) == {batch.bucket}
                np.add.at(counted, batch.images, weight * _images_of(step))
        position = sampler.position(sampler._current.first_step + len(batches) // world)
    assert np.allclose(counted, 1)
    assert mixed


def _images_of(step):
    """Images of a global batch, one that fills several ranks once."""
    return len({int(i) for batch in step for i in batch.images})


def test_ranks_take_the_first_ones_seed_and_refuse_other_data(monkeypatch):
    told = []
    monkeypatch.setattr("kohya_bucket.trainers.door.sampler.world", lambda: (2, 0))
    monkeypatch.setattr(
        "kohya_bucket.trainers.door.sampler.gather", lambda mine: [*told[:1], told.append(mine) or mine]
    )
    assert sampler_of({}, 2, seed=7).seed == 7
    assert sampler_of({}, 2, seed=8).seed == 7
    assert sampler_of({}, 2, names=[f"/elsewhere/{name}" for name in NAMES]).seed == 7
    with pytest.raises(RanksDifferError, match="largest_first was None, now False"):
        sampler_of({"largest_first": False}, 2)
    with pytest.raises(RanksDifferError) as error:
        sampler_of({"remainder": "pad"}, 3)
    assert str(error.value) == (
        "rank 1 holds another dataset than rank 0 (there, then on rank 1): remainder was keep, now pad; "
        "global_batch was 4, now 6. Every process must see the same files and settings; "
        "with a validation split, set validation_seed"
    )


def test_a_rank_with_other_files_is_told_the_first_that_differs(monkeypatch):
    """Also where the same names are in two folders that a rank lists in another order."""
    names = [f"/data/{folder}/{i}.png" for folder in ("cats", "dogs") for i in range(IMAGES // 2)]
    exchanged = names[IMAGES // 2 :] + names[: IMAGES // 2]
    monkeypatch.setattr("kohya_bucket.trainers.door.sampler.world", lambda: (2, 0))
    rounds = []
    monkeypatch.setattr("kohya_bucket.trainers.door.sampler.gather", lambda mine: rounds.append(mine) or [mine, mine])
    sampler_of({}, 2, names=names)
    first, here = rounds[:], []
    below = [name.removeprefix("/data/") for name in names]
    said = [*first, {"digests": ["of rank 0"]}, {"names": below}]
    monkeypatch.setattr(
        "kohya_bucket.trainers.door.sampler.gather", lambda mine: here.append(mine) or [said[len(here) - 1], mine]
    )
    with pytest.raises(RanksDifferError, match=r"rank 1\): image 0 is 'cats/0.png', now 'dogs/0.png'. Every process"):
        sampler_of({}, 2, names=exchanged)


def test_a_training_without_a_batch_ends_before_it_begins(capsys):
    with pytest.raises(SystemExit) as ended:
        sampler_of({"remainder": "drop", "small_buckets": "drop"}, 61)
    assert ended.value.code == 2
    assert "no batch is left to train: 60 images are never trained" in capsys.readouterr().err
