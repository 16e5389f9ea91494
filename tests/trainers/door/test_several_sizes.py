"""Images with several placements: resolutions, and moves to other buckets. The real sd-scripts: `compat_tests/`."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import ConfigError
from kohya_bucket.trainers.door.dataset_keys import DatasetKeys
from kohya_bucket.trainers.door.group import GroupPlanner, epoch_of, moved_images
from kohya_bucket.trainers.door.options import AdapterOptions
from kohya_bucket.trainers.door.placed import PlacedItems
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
BY_DATASETS = {"resolution_mode": "schedule", "resolution_epochs": [2]}


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


parts = st.lists(st.sampled_from([(), ((64, 64),), ((64, 96),), ((64, 64), (64, 64))]), min_size=1, max_size=3)


@given(parts, st.integers(1, 3), st.sampled_from(["keep", "pad", "merge", "catch_all"]), st.data())
def test_what_a_bucket_has_besides_its_size_is_equal_in_every_batch(layouts, ranks, remainder, data):
    """Frames and control images: nothing that differs in them meets in a batch, and each item is trained once."""
    rng = np.random.RandomState(data.draw(st.integers(0, 2**31)))
    n, sizes = rng.randint(1, 60), [(64, 64), (64, 128), (128, 64), (128, 128)]
    keys = [(*sizes[rng.randint(4)], (1, 9)[rng.randint(2)], *layouts[rng.randint(len(layouts))]) for _ in range(n)]
    items = PlacedItems.from_buckets([str(i) for i in range(n)], keys, 1, 3, (128, 128), np.zeros(n))
    more = {"merge_max_crop": 0.9} if remainder == "merge" else {}
    group = GroupPlanner([items, items], options({"remainder": remainder, **more}))
    plan = group.planner(ranks).plan(0, 1)
    trained = Counter()
    for step in range(plan.steps):
        for rank in range(ranks):
            bucket, images = plan.bucket(step, rank), plan.indices(step, rank)
            dataset = group.dataset_of(bucket)
            assert {i // n for i in images.tolist()} == {dataset}
            trained_at = items.bucket_keys[bucket - group.first_bucket[dataset]]
            found = {keys[i % n] for i in images.tolist()}
            assert {key[2:] for key in found} == {trained_at[2:]}
            assert remainder in ("merge", "catch_all") or found == {trained_at}
            trained.update(images.tolist())
    assert set(trained) == set(range(2 * n))
    if remainder != "pad":
        assert sum(trained.values()) - 2 * n == plan.ledger().repeated


@given(datasets(), st.integers(1, 3))
def test_changes_of_the_shape_are_those_of_the_plan(case, ranks):
    images, table = [case[0]] * 2, case[1]
    rows, group = epoch_of(images, table, [ranks], 1)[1], GroupPlanner(images, table)
    for row, epoch in zip(rows, [1, *np.cumsum([1, *(table.resolution_epochs or ())])[1:]], strict=False):
        plan = group.planner(ranks).plan(0, int(epoch))
        shapes = [
            [(*group.bucket_sizes[plan.bucket(s, r)].tolist(), len(plan.indices(s, r))) for s in range(plan.steps)]
            for r in range(ranks)
        ]
        assert row.shape_changes == max(sum(a != b for a, b in itertools.pairwise(mine)) for mine in shapes)


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
    ("table", "keys", "words"),
    [
        (TABLES[2], DatasetKeys((256, 256)), "enable_bucket is off"),
        (TABLES[1], DatasetKeys((256, 256), True, bucket_no_upscale=True), "would enlarge images"),
    ],
)
def test_what_a_data_set_rules_out(table, keys, words):
    with pytest.raises(ConfigError, match=words):
        refuse_conflicts(keys, options(table))


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"resolutions": []}, "resolutions is .*, but must be a list of sides or"),
        ({"resolutions": 512}, "must be a list of sides"),
        ({"resolutions": [512, "a"]}, "must be a list of sides"),
        ({"resolutions": [512, [512, 512]]}, "without repeats"),
        ({"resolution_mode": "schedule"}, "resolution_mode is 'schedule' without resolution_epochs"),
        ({"resolution_mode": "rotate"}, "resolution_mode is 'rotate'.* resolutions"),
        ({"resolutions": [512], "resolution_mode": "sometimes"}, "all, rotate, weighted, schedule"),
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
        ({"resolutions": [512, 768], "resolution_weights": [1, 2]}, "resolution_mode = 'weighted'"),
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


def at(side, batch_size=2, table=BY_DATASETS):
    sizes = np.array([(side, (1 + i % 3) * side) for i in range(12)])
    keys = DatasetKeys((side, side), True, 64, 2048, 64)
    names = [f"{i}.png" for i in range(len(sizes))]
    return place_images(names, sizes, np.ones(12, dtype=np.int64), batch_size, keys, options(table)).trained


def test_datasets_take_turns_by_their_resolutions():
    images = [at(256), at(512, 1), at(256)]
    counts, rows = epoch_of(images, options(BY_DATASETS), [1, 2], 1)
    assert [(row.epochs, row.gpus, row.samples, row.missed) for row in rows] == [
        ("1 to 2", 1, 24, 0), ("1 to 2", 2, 24, 0), ("from 3", 1, 12, 0), ("from 3", 2, 12, 0),
    ]  # fmt: skip
    assert len({(row.gpus, row.steps) for row in rows}) == 2
    assert [int(one.samples.sum()) for one in counts] == [12, 12, 12]
    assert [row.left_over.partition(":")[0] for row in rows] == [""] * 4
    _, rows = epoch_of([at(256, 4), at(512, 1)], options(BY_DATASETS), [1], 1)
    assert "with whole batches those of the stages would have 3, 12, and the shorter ones split" in rows[0].left_over
    plan = GroupPlanner(images, options(BY_DATASETS)).planner(1).plan(0, 3)
    assert {int(i) // 12 for step in range(plan.steps) for i in plan.step_indices(step)} == {1}


def test_a_part_of_the_datasets_has_no_schedule():
    """A cache, a dataset that is walked alone, and validation are of all images."""
    merge = {**BY_DATASETS, "remainder": "merge", "merge_max_crop": 0.5}
    plain = {"remainder": "merge", "merge_max_crop": 0.5}
    images, alone = at(256, 4, merge), at(256, 4, plain)
    with_it, without = moved_images(images, options(merge), {1, 2}), moved_images(alone, options(plain), {1, 2})
    assert [one.tolist() for one in with_it] == [one.tolist() for one in without]
    assert len(BatchTable(images, lambda *entry: entry, SimpleNamespace(seed=3, current_epoch=1), options(merge))) > 0
    validated = options({**BY_DATASETS, "remainder": "drop"}).for_validation()
    assert (validated.by_datasets, validated.remainder) == (False, "keep")


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([at(256), at(256)], "of 2 resolutions one after another, but they have 1 resolution .256x256."),
        ([at(256), at(320), at(512)], "but they have 3 resolutions .256x256, 320x320, 512x512."),
        ([replace(at(256), resolution=None)], "but they have none of their own: give each"),
    ],
)
def test_a_schedule_without_its_datasets_is_refused(images, message):
    with pytest.raises(ConfigError, match=message):
        GroupPlanner(images, options(BY_DATASETS))
