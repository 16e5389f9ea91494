"""Order "local": few shards are open at any step, whatever the shards are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import SIZES, cases, plan_epoch, trained

from kohya_bucket.errors import PlanError
from kohya_bucket.planning import EpochPlan
from kohya_bucket.planning.demand import Demand
from kohya_bucket.planning.stream import Purpose, stream
from kohya_bucket.planning.windows import windows_of_shards


def shards_open(plan: EpochPlan, shards: np.ndarray) -> np.ndarray:
    """[S] shards of which an image was trained in this step or before, and another one in this step or later."""
    steps = np.repeat(np.arange(plan.steps), plan.length)
    at = np.repeat(plan.start - np.cumsum(plan.length) + plan.length, plan.length) + np.arange(len(steps))
    shard = shards[plan.items[at]]
    first, last = np.full(shards.max(initial=0) + 1, plan.steps), np.full(shards.max(initial=0) + 1, -1)
    np.minimum.at(first, shard, steps)
    np.maximum.at(last, shard, steps)
    used = last >= 0
    change = np.bincount(first[used], minlength=plan.steps + 1) - np.bincount(last[used] + 1, minlength=plan.steps + 1)
    return np.cumsum(change)[: plan.steps]


@st.composite
def stores(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    """Bucket ids, shards of one bucket each, and a global batch that all but one shard of each bucket can fill."""
    rng = np.random.RandomState(draw(st.integers(0, 2**31)))
    batch = draw(st.integers(1, 9))
    sizes, of_shard = [], []
    for bucket in range(draw(st.integers(1, len(SIZES)))):
        many = draw(st.integers(0, 12))
        sizes += [*rng.randint(batch, 4 * batch + 1, many).tolist(), rng.randint(1, batch + 1)]
        of_shard += [bucket] * (many + 1)
    shards = np.repeat(rng.permutation(len(sizes)), sizes)
    ids = np.repeat(of_shard, sizes)
    mixed = rng.permutation(len(ids))
    return ids[mixed], shards[mixed], batch


@given(store=stores(), open_shards=st.integers(2, 30), seed=st.integers(0, 99), repeats=st.sampled_from([None, 2, 1.5]))
def test_of_shards_with_one_bucket_no_more_are_open_than_asked(store, open_shards, seed, repeats) -> None:
    ids, shards, batch = store
    plan = plan_epoch(ids, batch, seed=seed, order="local", shards=shards, open_shards=open_shards, repeats=repeats)
    if repeats is None:
        assert (trained(plan) == 1).all()
    if repeats != 1.5:  # which may leave less than a batch of a shard
        assert shards_open(plan, shards).max(initial=0) <= open_shards


@given(case=cases())
def test_an_image_waits_only_while_its_bucket_has_too_few_for_a_batch(case: dict) -> None:
    """Windows follow each other; a batch joins windows only over gaps that hold too few images to fill it."""
    case.update(repeats=None, regularization=None)
    plan = plan_epoch(**case, order="local")
    ids, shards, most = case["bucket_ids"], case["shards"], case["nodes"] * case["open_shards"] // 2
    image = np.flatnonzero(ids >= 0).astype(np.int32)
    demand = Demand(image, ids[image], None, len(case["bucket_sizes"]))
    rng = stream(Purpose.SHARDS, plan.seed, plan.epoch, 0)
    window, _ = windows_of_shards(shards.astype(np.int32), demand, plan.global_batch, most, rng)
    used = np.unique(shards[image])
    assert np.bincount(window[used], minlength=1).max() <= most
    trained_in = -1
    for s in range(plan.steps):
        batch = plan.items[plan.start[s] : plan.start[s] + plan.length[s]]
        first, last = window[shards[batch]].min(), window[shards[batch]].max()
        assert last >= trained_in
        trained_in = last
        between = (ids == plan.bucket_of_step[s]) & (window[shards] > first) & (window[shards] < last)
        assert between.sum() < plan.global_batch[plan.bucket_of_step[s]]
        assert np.isin(np.flatnonzero(between), batch).all()


@given(store=stores(), most=st.integers(1, 15), seed=st.integers(0, 99))
def test_a_buckets_shards_are_spread_evenly_or_are_neighbours(store, most: int, seed: int) -> None:
    ids, shards, batch = store
    demand = Demand(np.arange(len(ids), dtype=np.int32), ids, None, int(ids.max()) + 1)
    global_batch = np.full(demand.n_buckets, batch)
    window, _ = windows_of_shards(shards.astype(np.int32), demand, global_batch, most, np.random.RandomState(seed))
    _, sample = np.unique(shards, return_index=True)
    assert np.bincount(window).max() <= most
    for bucket in np.unique(ids):
        per_window = np.bincount(window[ids[sample] == bucket], minlength=int(window.max()) + 1)
        used = np.flatnonzero(per_window)
        assert per_window[used[0] : used[-1] + 1].min() >= 1
        if per_window.sum() >= len(per_window):
            assert per_window.max() - per_window.min() <= 2


def test_every_shard_is_read_once_and_in_another_order_each_epoch() -> None:
    shards = np.arange(4000) // 50
    ids = shards % 5
    first = []
    for epoch in range(3):
        plan = plan_epoch(ids, 5, world_size=2, epoch=epoch, order="local", shards=shards, open_shards=16)
        order = shards[np.concatenate([plan.step_indices(s) for s in range(plan.steps)])]
        _, seen = np.unique(order, return_index=True)
        first.append(tuple(np.argsort(seen)))
        assert shards_open(plan, shards).max() <= 16
        # all buckets are trained among each other: none is left for the end, none is through at the beginning
        for bucket in range(5):
            at = np.flatnonzero(plan.bucket_of_step == bucket)
            assert at[0] < 40
            assert at[-1] >= plan.steps - 40
    assert len(set(first)) == 3


@given(seed=st.integers(0, 10**6), repeats=st.integers(2, 4), nodes=st.integers(1, 2))
def test_repeats_are_in_different_batches_of_one_window(seed: int, repeats: int, nodes: int) -> None:
    shards = np.arange(900) // 30
    ids = shards % 3
    options = {"order": "local", "shards": shards, "open_shards": 8, "nodes": nodes, "repeats": repeats}
    plan = plan_epoch(ids, 4, seed=seed, **options)
    assert (trained(plan) == repeats).all()
    assert all(len(set(batch)) == len(batch) for batch in plan.rank_batches(0))
    assert shards_open(plan, shards).max() <= 8 * nodes


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "needs shards"),
        ({"shards": np.zeros(9, int)}, r"of shape \[9\]"),
        ({"shards": np.zeros(10)}, "float64"),
        ({"shards": np.full(10, -1)}, "from -1 to -1"),
        ({"shards": np.full(10, 10**6)}, "count the shards from 0"),
        ({"shards": np.zeros(10, int), "open_shards": 1}, "open_shards is 1"),
        ({"shards": np.zeros(10, int), "nodes": 2**31 - 1}, "nodes is 2147483647"),  # would take 16 GB to deal out
    ],
)
def test_what_cannot_be_is_refused(options: dict, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_epoch(np.zeros(10, int), 2, order="local", **options)


@given(store=stores(), nodes=st.sampled_from([2, 3, 4]), per_rank=st.integers(1, 2), seed=st.integers(0, 99))
def test_nodes_read_shards_of_their_own(store, nodes: int, per_rank: int, seed: int) -> None:
    """In a window, nodes share no more of a bucket's shards than there are borders between neighbours."""
    ids, shards, _ = store
    options = {"order": "local", "shards": shards, "open_shards": 4, "nodes": nodes, "seed": seed}
    plan = plan_epoch(ids, per_rank, world_size=nodes, **options)
    assert (trained(plan) >= 1).all()
    alone = plan_epoch(ids, per_rank * nodes, **options)
    assert alone.items.tolist() == plan.items.tolist()
    demand = Demand(np.arange(len(ids), dtype=np.int32), ids, None, int(ids.max()) + 1)
    rng = stream(Purpose.SHARDS, seed, 0, 0)
    window, _ = windows_of_shards(shards.astype(np.int32), demand, plan.global_batch, nodes * 2, rng)
    readers: dict[tuple[int, int], dict[int, set[int]]] = {}
    for s in range(plan.steps):
        batch = plan.items[plan.start[s] : plan.start[s] + plan.length[s]]
        for place, image in enumerate(batch.tolist()):
            shard, node = int(shards[image]), place * nodes // len(batch)
            found = readers.setdefault((int(ids[image]), int(window[shard])), {})
            found.setdefault(shard, set()).add(node)
    for of_shards in readers.values():
        assert sum(len(of_nodes) - 1 for of_nodes in of_shards.values()) <= nodes - 1
