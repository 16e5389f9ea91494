"""The timesteps that musubi-tuner's `--num_timestep_buckets` spreads over an epoch."""

import pytest
from test_sampler_positions import sampler_of

from kohya_bucket.trainers.musubi.batches import TimestepPool
from tests.thinned import one_in

BATCH_SIZE = 4


def pool_of(sampler):
    return TimestepPool(len(sampler) * BATCH_SIZE, BATCH_SIZE)


@pytest.mark.long
def test_a_resumed_run_without_a_seed_has_the_timesteps_that_the_first_one_would_have_had():
    first = sampler_of({}, BATCH_SIZE, seed=5)
    pool = pool_of(first)
    whole = [pool.draw(10, index) for index in first]
    resumed = sampler_of({}, BATCH_SIZE, seed=99)  # each start draws a seed of its own
    pool = pool_of(resumed)  # made with the loader, before or after the state is loaded
    done = 3
    resumed.resume(first.position(done))
    assert [pool.draw(10, index) for index in resumed] == whole[done:]


@pytest.mark.parametrize(
    "table", one_in(3, [{"max_pixels": 16 * 256 * 256}, {}, {"step_shapes": "equal_cost", "remainder": "pad"}])
)
def test_no_batch_shares_its_timesteps_with_another(table):
    sampler = sampler_of(table, BATCH_SIZE)
    pool = TimestepPool(len(sampler) * sampler.largest_batch, sampler.largest_batch)
    batches = list(sampler)
    assert max(len(index.images) for index in batches) == sampler.largest_batch
    drawn = [t for index in batches for t in pool.draw(10, index)]
    assert len(set(drawn)) == len(drawn)


def test_an_epoch_has_as_many_timesteps_of_each_part_and_other_ones_than_the_next():
    drawn = []
    for epoch in (1, 2):
        sampler = sampler_of({}, BATCH_SIZE, epoch)
        pool = TimestepPool(len(sampler) * BATCH_SIZE, BATCH_SIZE)
        drawn.append([pool.draw(10, index) for index in sampler])
    assert drawn[0] != drawn[1]
    assert {int(t * 10) for batch in drawn[0] for t in batch} == set(range(10))
    assert pool.draw(None, next(iter(sampler))) is None


@pytest.mark.parametrize("remainder", ["keep", "pad", "catch_all"])
def test_no_batch_is_larger_than_the_largest_also_where_one_is_filled_with_repeats(remainder):
    sampler = sampler_of({"remainder": remainder}, 1000)
    assert max(len(index.images) for index in sampler) <= sampler.largest_batch
