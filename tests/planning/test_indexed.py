"""Plans without a table in memory: the laws of an epoch, of resuming, and of the permutation that they rest on."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import PlanError, ResumeError
from kohya_bucket.images import bucket_index
from kohya_bucket.images.bucket_index import BucketIndex
from kohya_bucket.planning import IndexedPlan, indexed
from kohya_bucket.planning.indexed import permuted

KEYS = np.arange(1, 7, dtype=np.uint64)


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """Many blocks with few images."""
    monkeypatch.setattr(indexed, "_BLOCK", 16)


def index_of(ids):
    return BucketIndex(np.argsort(ids, kind="stable"), np.concatenate([[0], np.cumsum(np.bincount(ids))]))


def trained(plan, first, end):
    """Images of some steps, each once in a step."""
    found = Counter()
    for step in range(first, end):
        found.update({int(i) for rank in range(plan.world_size) for i in plan.indices(step, rank)})
    return found


sets = st.lists(st.integers(0, 9), min_size=1, max_size=300).map(np.array)
sizes = st.integers(1, 5)


@given(sets, sizes, sizes, st.integers(), st.sampled_from(["keep", "drop"]))
def test_an_epoch_is_exact(ids, batch, ranks, seed, remainder):
    plan = IndexedPlan(index_of(ids), batch, ranks, seed=seed, remainder=remainder)
    for step in range(plan.steps):
        rows = [plan.indices(step, rank) for rank in range(ranks)]
        assert {int(ids[i]) for row in rows for i in row} == {plan.bucket(step)}
        assert all(1 <= len(row) <= batch for row in rows)
        assert remainder == "keep" or {len(row) for row in rows} == {batch}
    seen = trained(plan, 0, plan.steps)
    if remainder == "keep":
        assert seen == Counter(range(len(ids)))
    else:
        assert max(seen.values(), default=1) == 1
        assert len(seen) == sum(n // (batch * ranks) for n in np.bincount(ids)) * batch * ranks


@given(sets, st.lists(st.tuples(sizes, sizes, st.floats(0, 1)), min_size=1, max_size=4), st.integers(0, 99))
def test_resumed_on_any_number_of_ranks(ids, parts, seed):
    index, state, seen = index_of(ids), None, Counter()
    for number, (batch, ranks, share) in enumerate(parts):
        plan = IndexedPlan(index, batch, ranks, seed=seed if state is None else 0)
        if state is not None:
            plan.load_state_dict(state)
        end = plan.steps if number == len(parts) - 1 else int(share * plan.steps)
        seen += trained(plan, 0, end)
        state = plan.state_dict(end)
    assert seen == Counter(range(len(ids)))


@given(sets, sizes, sizes)
def test_resumed_as_before_it_is_the_same_plan(ids, batch, ranks):
    whole = IndexedPlan(index_of(ids), batch, ranks, seed=3, epoch=2)
    rest = IndexedPlan(index_of(ids), batch, ranks)
    rest.load_state_dict(whole.state_dict(whole.steps // 2))
    assert rest.steps == whole.steps - whole.steps // 2
    for step in range(rest.steps):
        assert rest.indices(step, 0).tolist() == whole.indices(step + whole.steps // 2, 0).tolist()


@given(st.integers(1, 2000))
def test_permutations_are_complete(n):
    assert sorted(permuted(np.arange(n), n, KEYS).tolist()) == list(range(n))


def test_permutations_look_drawn():
    """Neighbours end anywhere: distances and parities are those of a draw, within four standard deviations."""
    n, draws = 10_000, np.random.RandomState(0)
    for _ in range(20):
        out = permuted(np.arange(n), n, draws.randint(0, 1 << 63, 6, dtype=np.uint64))
        assert abs(np.abs(np.diff(out)).mean() / n - 1 / 3) < 4 * 0.2357 / n**0.5
        assert abs(np.mean(out[:-1] % 2 == out[1:] % 2) - 0.5) < 4 * 0.5 / n**0.5
        assert np.count_nonzero(out == np.arange(n)) < 8  # as many stay as in a draw: one


def test_each_epoch_has_an_order_of_its_own():
    ids = np.arange(400) % 3
    plans = [IndexedPlan(index_of(ids), 4, epoch=epoch) for epoch in range(3)]
    orders = {tuple(i for batch in plan.batches(0) for i in batch.tolist()) for plan in plans}
    assert len(orders) == 3
    again = IndexedPlan(index_of(ids), 4, epoch=2)
    assert [b.tolist() for b in again.batches(0, 5)] == [b.tolist() for b in plans[2].batches(0)][5:]


def test_buckets_are_spread_over_the_epoch():
    plan = IndexedPlan(index_of(np.repeat([0, 1], [2000, 200])), 2)
    rare = [step for step in range(plan.steps) if plan.bucket(step) == 1]
    assert np.max(np.diff(rare)) < 4 * 16


def test_index_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(bucket_index, "_SORTED_AT_ONCE", 100)
    ids = np.random.RandomState(0).randint(0, 40, 1234).astype(np.int16)
    np.save(tmp_path / "ids.npy", ids)
    shown = []
    mapped = np.load(tmp_path / "ids.npy", mmap_mode="r")
    written = BucketIndex.write(tmp_path / "index", mapped, lambda *numbers: shown.append(numbers))
    assert shown[::12] == [(100, 1234), (1234, 1234)]
    opened = BucketIndex.open(tmp_path / "index")
    for found in (written, opened):
        assert np.array_equal(found.images, np.argsort(ids, kind="stable"))
        assert np.array_equal(found.counts, np.bincount(ids))
    with pytest.raises(PlanError, match="is there already"):
        BucketIndex.write(tmp_path / "index", ids)
    (tmp_path / "index" / "starts.bin").unlink()
    with pytest.raises(PlanError, match="no complete index"):
        BucketIndex.open(tmp_path / "index")
    (tmp_path / "index" / "starts.bin").mkdir()  # as much in the way of reading as a share that is away
    with pytest.raises(PlanError, match="cannot be read at the moment"):
        BucketIndex.open(tmp_path / "index")
    with pytest.raises(PlanError, match="image 1 has bucket -1"):
        BucketIndex.write(tmp_path / "other", np.array([0, -1]))
    with pytest.raises(PlanError, match="no images"):
        BucketIndex.write(tmp_path / "other", ids[:0])
    assert not (tmp_path / "other").exists()


def test_what_is_wrong_is_said():
    index = index_of(np.arange(10) % 2)
    plan = IndexedPlan(index, 2)
    for call, said in [
        (lambda: plan.indices(plan.steps, 0), "there is no step 6: the plan has 6"),
        (lambda: plan.indices(0, 1), "there is no rank 1 of 1"),
        (lambda: IndexedPlan(index, 0), "batch_size"),
        (lambda: IndexedPlan(index, 1, remainder="merge"), "remainder"),
    ]:
        with pytest.raises(PlanError, match=said):
            call()
    other = IndexedPlan(index_of(np.arange(11) % 2), 2)
    with pytest.raises(ResumeError, match="buckets"):
        other.load_state_dict(plan.state_dict(1))
