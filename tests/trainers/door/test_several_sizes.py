"""Images with several placements: resolutions, and moves to other buckets. The real sd-scripts: `compat_tests/`."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kohya_bucket import ConfigError
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.group import GroupPlanner, moved_images
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placing import place_all, place_images, refuse_conflicts
from kohya_bucket.trainers.sdscripts.tables import BatchTable, KeyTable

TABLES = [
    {"remainder": "merge", "merge_max_crop": 0.5},
    {"remainder": "catch_all"},
    {"resolutions": [256, 384]},
    {"resolutions": [256, 384, [512, 256]], "resolution_mode": "rotate"},
    {"resolutions": [256, 384], "resolution_mode": "weighted", "resolution_weights": [3, 1]},
    {"resolutions": [256, 384], "resolution_mode": "rotate", "remainder": "merge", "merge_max_crop": 0.5},
    {"resolutions": [256, 384], "resolution_mode": "schedule", "resolution_epochs": [3]},
]


def options(table):
    return AdapterOptions.from_tables(("here", table))


@st.composite
def datasets(draw):
    table = draw(st.sampled_from(TABLES))
    no_upscale = table.get("remainder") != "catch_all" and draw(st.booleans())
    n = draw(st.integers(1, 50))
    rng = np.random.RandomState(draw(st.integers(0, 2**31)))
    sizes = rng.randint(64, 1200, (n, 2)).astype(np.int32)
    keys = DatasetKeys((256, 256), True, 64, 2048, 64, no_upscale)
    names = [f"{i}.png" for i in range(n)]
    placing = place_images(names, sizes, rng.choice([1, 2], n), draw(st.integers(1, 5)), keys, options(table))
    return placing.trained, options(table)


@settings(max_examples=20, deadline=None)
@given(datasets(), st.integers(0, 9))
def test_walking_by_number_trains_what_is_asked(case, epoch):
    images, table = case
    clock = SimpleNamespace(seed=3, current_epoch=epoch)
    batches = BatchTable(images, lambda index, size, number: (index, size, number), clock, table)
    keys = KeyTable(images)
    seen = Counter()
    for i in range(len(batches)):
        batch, size, number = batches[i]
        assert (size, number) == (len(batch.images), 0)
        width, height = images.buckets[batch.bucket]
        for image in batch.images.tolist():
            placed = images.placed_at(image, batch.bucket)
            bucket, resized = placed.bucket_sizes[0].tolist(), placed.resized_sizes[0].tolist()
            assert bucket == [width, height]
            assert resized[0] >= width
            assert resized[1] >= height
            if images.no_upscale:
                assert (images.sizes[image] >= bucket).all()
            seen[images.keys[image]] += 1
    ids = images.bucket_ids.reshape(len(images.keys), -1)
    times = (ids >= 0).sum(axis=1) if images.mode == "all" else np.ones(len(images.keys), dtype=int)
    assert seen == Counter(dict(zip(images.keys, (times * images.repeats).tolist(), strict=True)))
    assert sum(map(len, keys)) == int(((ids >= 0).sum(axis=1) * images.repeats).sum())


@settings(max_examples=12, deadline=None)
@given(datasets(), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_moves_are_known_before_training(case, ranks, seed):
    """What is cached at a second size beforehand is all that any epoch trains at a second size."""
    images, table = case
    planner = GroupPlanner([images, images], table)
    moved = set(planner.planner(ranks).moved_pairs())
    lengths = set()
    for epoch in range(7):
        plan = planner.planner(ranks).plan(seed, epoch)
        lengths.add(plan.steps)
        rows = plan.ledger()
        away = rows.to_bucket != rows.bucket
        assert set(zip(rows.bucket[away].tolist(), rows.to_bucket[away].tolist(), strict=True)) <= moved
        assert len(rows.image) == 0 or rows.missed == 0
    assert len(lengths) == 1
    groups = planner.bucket_groups
    assert all(groups[a] == groups[b] for a, b in moved)


@settings(max_examples=12, deadline=None)
@given(datasets(), st.integers(0, 99))
def test_all_sizes_of_all_epochs_are_known_for_the_numbers_of_processes_named(case, seed):
    images, table = case
    moved = moved_images(images, table, [3, 1])
    sizes = [
        (i, images.buckets[k])
        for rows in (images.pairs, moved)
        for i, k in zip(*map(np.ndarray.tolist, rows), strict=True)
    ]
    assert len(set(sizes)) == len(sizes)
    for ranks in (1, 3):
        planner = GroupPlanner([images], table)
        for epoch in range(5):
            plan = planner.planner(ranks).plan(seed, epoch)
            trained = {
                (image, images.buckets[plan.bucket(step, rank)])
                for step in range(plan.steps)
                for rank in range(ranks)
                for image in plan.indices(step, rank).tolist()
            }
            assert trained <= set(sizes)


def test_a_small_image_has_the_larger_resolutions_only_once():
    keys = DatasetKeys((256, 256), True, 64, 1024, 64, bucket_no_upscale=True)
    columns = place_all(keys, options({"resolutions": [256, 512, 768]}), np.array([[200, 200], [600, 600], [900, 900]]))
    assert [c.placed.tolist() for c in columns] == [[True, True, True], [False, True, True], [False, True, True]]
    assert columns[2].bucket_sizes[1].tolist() == [576, 576]


def test_the_fingerprint_knows_the_sizes():
    sizes = np.full((9, 2), 500, dtype=np.int32)
    keys = DatasetKeys((256, 256), True, 64, 1024)
    fingerprints = []
    for table in [{}, *TABLES, {"remainder": "merge", "merge_max_crop": 0.1}]:
        images = place_images(list("abcdefghi"), sizes, np.ones(9, dtype=int), 2, keys, options(table)).trained
        fingerprints.append(str(GroupPlanner([images], options(table)).fingerprint(1)))
    assert len(set(fingerprints)) == len(fingerprints)


@pytest.mark.parametrize(
    ("table", "keys", "own_sizes", "words"),
    [
        (TABLES[2], DatasetKeys((256, 256)), False, "enable_bucket is off"),
        (TABLES[0], DatasetKeys((256, 256), True), True, "remainder = 'merge' trains images at other sizes"),
        (TABLES[2], DatasetKeys((256, 256), True), True, "resolutions trains images at other sizes"),
        (TABLES[1], DatasetKeys((256, 256), True, bucket_no_upscale=True), False, "would enlarge images"),
    ],
)
def test_what_a_data_set_rules_out(table, keys, own_sizes, words):
    with pytest.raises(ConfigError, match=words):
        refuse_conflicts(keys, options(table), own_sizes=own_sizes)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"resolutions": []}, "resolutions is .*, but must be a list of sides or"),
        ({"resolutions": 512}, "must be a list of sides"),
        ({"resolutions": [512, "a"]}, "must be a list of sides"),
        ({"resolutions": [512, [512, 512]]}, "without repeats"),
        ({"resolution_mode": "rotate"}, "resolution_mode is 'rotate', which has no effect without resolutions"),
        ({"resolutions": [512], "resolution_mode": "sometimes"}, "must be one of all, rotate, weighted, schedule"),
        (
            {"resolutions": [512, 768], "resolution_mode": "weighted"},
            "'weighted' without resolution_weights: say how often",
        ),
        (
            {"resolutions": [512, 768], "resolution_mode": "schedule"},
            r"resolution_epochs is \[\], but must hold 1 of 2 res",
        ),
        (
            {"resolutions": [512, 768], "resolution_mode": "schedule", "resolution_epochs": [0]},
            r"resolution_epochs is \[0\], but must be a list of whole numbers of epochs, 1 or more",
        ),
        ({"resolutions": [512, 768], "resolution_weights": [1, 2]}, "no effect without resolution_mode = 'weighted'"),
        (
            {"resolutions": [512, 768], "resolution_mode": "weighted", "resolution_weights": [1]},
            "1 number for 2 resolutions",
        ),
        (
            {"resolutions": [512, 768], "resolution_mode": "weighted", "resolution_weights": [0, 0]},
            "0 or more and not all 0",
        ),
        (
            {"resolutions": [512, 768], "resolution_mode": "weighted", "resolution_weights": [0.123, 0.7717]},
            "exact shares would take",
        ),
        ({"resolutions": [512, 768], "rule": "preset:sd15"}, "do not follow from a resolution"),
        ({"merge_max_crop": 1}, "a share of the image from 0 to less than 1"),
    ],
)
def test_a_wrong_table_names_what_is_allowed(table, words):
    with pytest.raises(ConfigError, match=words):
        options(table)
