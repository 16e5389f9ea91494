"""A dataset's images in their buckets, and the tables that sd-scripts looks batches up in."""

import pickle
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import KohyaBuckets
from kohya_bucket.errors import BucketSettingsError
from kohya_bucket.trainers.door.batches import PlannedBatch
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys, rule_for
from kohya_bucket.trainers.door.group import GroupPlanner
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import PlacedDataset
from kohya_bucket.trainers.sdscripts.make_buckets import bucket_info
from kohya_bucket.trainers.sdscripts.tables import BatchTable, KeyTable


def entry(bucket_index, bucket_batch_size, batch_index):
    return SimpleNamespace(bucket_index=bucket_index, bucket_batch_size=bucket_batch_size, batch_index=batch_index)


@st.composite
def datasets(draw):
    sizes = draw(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), min_size=1, max_size=60))
    repeats = draw(st.lists(st.integers(1, 4), min_size=len(sizes), max_size=len(sizes)))
    rule = KohyaBuckets(512, no_upscale=draw(st.booleans()))
    keys = [f"{i}.png" for i in range(len(sizes))]
    return PlacedDataset(keys, np.array(repeats), rule.place(sizes), draw(st.integers(1, 5)))


def lookup(table, batches, index):
    """What sd-scripts' `BaseDataset.__getitem__` does with the two tables."""
    found = batches[index]
    start = found.batch_index * found.bucket_batch_size
    return table[found.bucket_index][start : start + found.bucket_batch_size]


@given(datasets(), st.integers(0, 3))
def test_walking_by_number_trains_each_image_its_repeats(images, epoch):
    clock = SimpleNamespace(seed=1, current_epoch=epoch)
    keys, batches = KeyTable(images), BatchTable(images, entry, clock, AdapterOptions())
    placed = images.placement.placed
    asked = Counter({k: int(r) for k, r, p in zip(images.keys, images.repeats, placed, strict=True) if p})
    seen = Counter()
    for i in range(len(batches)):
        batch = lookup(keys, batches, i)
        seen.update(batch)
        assert len({images.bucket_ids[images.keys.index(k)] for k in batch}) == 1
    assert seen == asked
    assert len(batches) == int((-(-images.samples_per_bucket // images.batch_size)).sum())
    assert Counter(k for bucket in keys for k in bucket) == asked


@given(datasets())
def test_rows_add_up(images):
    (counts,) = GroupPlanner([images], AdapterOptions()).counts()
    rows = images.rows(counts)
    assert sum(r.images for r in rows) == int(images.placement.placed.sum())
    assert sum(r.samples for r in rows) == int(images.repeats[images.placement.placed].sum())
    assert [r.batches for r in rows] == (-(-images.samples_per_bucket // images.batch_size)).tolist()
    info = bucket_info(images)
    assert [b["resolution"] for b in info["buckets"].values()] == [r.bucket.as_tuple() for r in rows]


def test_an_index_survives_the_way_to_a_worker():
    batch = PlannedBatch(5, 2, 1, np.array([3, 1, 3], dtype=np.int32), 99, 4, 17)
    copy = pickle.loads(pickle.dumps(batch))
    assert copy.images.tolist() == [3, 1, 3]
    assert vars(copy) == vars(batch) | {"images": copy.images}


def test_epochs_differ_in_order():
    sizes = np.full((40, 2), 512)
    images = PlacedDataset([str(i) for i in range(40)], np.ones(40, dtype=np.int64), KohyaBuckets(512).place(sizes), 4)
    clock = SimpleNamespace(seed=1, current_epoch=1)
    keys, batches = KeyTable(images), BatchTable(images, entry, clock, AdapterOptions())
    first = [lookup(keys, batches, i) for i in range(10)]
    clock.current_epoch = 2
    assert [lookup(keys, batches, i) for i in range(10)] != first
    clock.current_epoch = 1
    assert [lookup(keys, batches, i) for i in range(10)] == first


def test_limits_are_rounded_to_the_step_as_sd_scripts_does():
    rule = rule_for(DatasetKeys((512, 512), True, 250, 1000, 64))
    assert (rule.min_size, rule.max_size) == (192, 1024)


def test_without_bucketing_every_image_goes_to_the_resolution():
    rule = rule_for(DatasetKeys((512, 768)))
    placement = rule.place([(100, 100), (0, 0), (3000, 10)])
    assert placement.bucket_sizes.tolist() == [[512, 768], [0, 0], [512, 768]]


@pytest.mark.parametrize("no_upscale", [False, True])
def test_settings_that_stop_sd_scripts_stop_here_with_the_remedy(no_upscale):
    with pytest.raises(BucketSettingsError, match="max_bucket_reso 1024"):
        rule_for(DatasetKeys((2048, 512), True, bucket_no_upscale=no_upscale))
