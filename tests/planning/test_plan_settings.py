"""Golden plans, options, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import SIZES, trained

from kohya_bucket.errors import KohyaBucketError, PlanError
from kohya_bucket.planning import LedgerReason, dealt_costs, idle_share, idle_share_of, plan_epoch
from kohya_bucket.planning.demand import _stable_order
from kohya_bucket.planning.demand_model import DemandModel
from kohya_bucket.planning.options import PlanOptions
from kohya_bucket.planning.planner import EpochPlanner

IDS = np.array([0, 1, 0, 2, 0, 1, 0, 0, 2, 1, 0, -1, 0, 1])


def steps_of(plan) -> list[list[int]]:
    return [plan.step_indices(s).tolist() for s in range(plan.steps)]


# Equal on every Python and numpy: these lists must never change within one PLAN_VERSION.
GOLDEN = {
    "keep, shuffled": [[8, 3], [4], [1, 13, 9], [10, 7, 0], [5], [2, 12, 6]],
    "keep, shuffled, epoch 1, 2 ranks": [[6, 4, 2, 7], [12, 10, 0], [3, 8], [13, 5, 1, 9]],
    "pad, runs": [[2, 7, 12], [9, 5, 13], [1, 9, 5], [8, 3, 8], [7, 2, 0], [4, 6, 10]],
    "drop, sorted": [[0, 4, 2], [10, 6, 12], [13, 5, 1]],
    "merge, repeats": [
        [6, 10, 2, 12],
        [9, 1, 13, 5],
        [7, 0],
        [3, 8, 8, 3],
        [1, 9, 13, 5],
        [10, 0, 4, 6],
        [12, 2, 7, 4],
    ],
    "catch_all, file": [[0, 2, 4], [6, 7, 10], [12, 9, 8], [3], [1, 5, 13]],
    "fractions": [[2, 10], [5, 1], [3]],
}


def golden_plans() -> dict:
    common = {"bucket_sizes": SIZES[:3], "seed": 42}
    return {
        "keep, shuffled": plan_epoch(IDS, 3, **common),
        "keep, shuffled, epoch 1, 2 ranks": plan_epoch(IDS, 2, world_size=2, epoch=1, step_shapes="one", **common),
        "pad, runs": plan_epoch(IDS, 3, remainder="pad", order="runs", run_length=2, **common),
        "drop, sorted": plan_epoch(IDS, 3, remainder="drop", small_buckets="drop", order="sorted", **common),
        "merge, repeats": plan_epoch(IDS, 4, remainder="merge", merge_max_crop=0.5, repeats=2, **common),
        "catch_all, file": plan_epoch(IDS, 3, remainder="catch_all", order="file", **common),
        "fractions": plan_epoch(IDS, 3, repeats=0.4, epoch=2, **common),
    }


@pytest.mark.parametrize("name", list(golden_plans()))
def test_golden_plans(name: str) -> None:
    assert steps_of(golden_plans()[name]) == GOLDEN[name]


def test_golden_hash_of_a_large_plan() -> None:
    ids = np.arange(100_003) * 7919 % 1013 % 31
    plan = plan_epoch(ids, 4, world_size=2, seed=123456789012345, epoch=17, repeats=3, step_shapes="one")
    assert plan.hash == "3b134f1e46ca28eebac9d0cd6cf6191a"


def test_max_pixels_gives_small_buckets_larger_batches() -> None:
    ids = np.repeat(np.arange(3), 40)
    sizes = [(1024, 1024), (512, 512), (512, 1024)]
    plan = plan_epoch(ids, max_pixels=4 * 1024 * 1024, bucket_sizes=sizes, world_size=2)
    assert plan.global_batch.tolist() == [8, 32, 16]
    assert plan_epoch(ids, 6, max_pixels=4 * 1024 * 1024, bucket_sizes=sizes).global_batch.tolist() == [4, 6, 6]
    assert (trained(plan) == 1).all()
    with pytest.raises(PlanError, match="max_pixels is 600,000, but one image of bucket 1024x1024 has 1,048,576"):
        plan_epoch(ids, max_pixels=600_000, bucket_sizes=sizes)
    with pytest.raises(PlanError, match="without bucket_sizes"):
        plan_epoch(ids, max_pixels=600_000)


def test_the_line_of_the_ledger() -> None:
    ids = np.repeat([0, 3], [1200, 3])
    plan = plan_epoch(ids, 3, world_size=2, remainder="pad", bucket_sizes=SIZES, step_shapes="one")
    assert plan.ledger().text == "1,203 images, 0 missed, 3 repeated to fill bucket 640x384"
    assert plan_epoch(ids, 4).ledger().text == "1,203 images, 0 missed, 0 repeated"
    lone = plan_epoch([0, -1], 1, world_size=2, bucket_sizes=SIZES)
    assert lone.ledger().text == (
        "2 images, 1 missed (1 without a bucket), 1 repeated so that no rank is empty, to fill bucket 512x512"
    )
    dropped = plan_epoch(ids, 7, remainder="drop", small_buckets="drop", bucket_sizes=SIZES).ledger()
    assert dropped.text == "1,203 images, 6 missed (6 dropped with the remainder of 2 buckets), 0 repeated"
    caught = plan_epoch(ids, 7, remainder="catch_all", bucket_sizes=SIZES, repeats=2).ledger()
    assert caught.text == "1,203 images asked 2,406 times, 0 missed, 0 repeated, 6 trained at the base size"
    assert {row["image"] for row in caught.rows()} == {1200, 1201, 1202}
    assert caught.rows()[0] == {
        "image": 1200,
        "bucket": "640x384",
        "trained_in": "512x512",
        "delta": 0,
        "reason": LedgerReason.CAUGHT.text,
    }


def test_budgets_of_tokens() -> None:
    ids, tokens = np.repeat(np.arange(3), 40), [4096, 1024, 2048]
    plan = plan_epoch(ids, max_tokens=8192, bucket_tokens=tokens, world_size=2)
    assert plan.global_batch.tolist() == [4, 16, 8]
    assert (trained(plan) == 1).all()
    assert plan_epoch(ids, 3, max_tokens=8192, bucket_tokens=tokens).global_batch.tolist() == [2, 3, 3]
    with pytest.raises(PlanError, match=r"max_tokens is 3,000.* 4,096 tokens"):
        plan_epoch(ids, max_tokens=3000, bucket_tokens=tokens)
    with pytest.raises(PlanError, match=r"max_tokens .*bucket_tokens"):
        plan_epoch(ids, max_tokens=8000)
    with pytest.raises(PlanError, match="bucket_sizes has 2 entries and bucket_tokens 3: give one for every bucket"):
        plan_epoch(ids, 4, bucket_sizes=SIZES[:2], bucket_tokens=tokens)


def test_groups_are_never_mixed() -> None:
    ids = np.array([0] * 5 + [1] * 5 + [2] * 5 + [3] * 5)
    for remainder in ("merge", "catch_all"):
        plan = plan_epoch(
            ids,
            4,
            remainder=remainder,
            **({"merge_max_crop": 0.9} if remainder == "merge" else {}),
            bucket_sizes=[(512, 512), (512, 512), (640, 384), (640, 384)],
            bucket_groups=[0, 1, 0, 1],
        )
        assert plan.moves
        for s in range(plan.steps):
            assert {int(k) % 2 for k in ids[plan.step_indices(s)]} == {int(plan.bucket_of_step[s]) % 2}


def test_merge_prefers_the_least_crop_and_keeps_to_the_limit() -> None:
    ids = np.array([0] * 8 + [1] * 1 + [2] * 8)
    sizes = [(512, 512), (576, 512), (1024, 256)]
    plan = plan_epoch(ids, 4, remainder="merge", bucket_sizes=sizes, merge_max_crop=0.2)
    assert plan.ledger().rows()[0]["trained_in"] == "512x512"
    assert (trained(plan) == 1).all()
    strict = plan_epoch(ids, 4, remainder="merge", bucket_sizes=sizes, merge_max_crop=0.05)
    assert len(strict.ledger()) == 0
    assert sorted(strict.length.tolist()) == [1, 4, 4, 4, 4]


def test_idle_shares() -> None:
    assert idle_share([[2.0, 1.0], [3.0, 3.0]]) == pytest.approx(1 - 4.5 / 5)
    assert idle_share(np.zeros((0, 2))) == 0
    ids = np.repeat([0, 5], [64, 64])
    plan = plan_epoch(ids, 4, world_size=4, bucket_sizes=[*SIZES[:5].tolist(), [256, 256]])
    assert idle_share_of(plan) == 0
    alone = plan_epoch(ids, 4, bucket_sizes=[*SIZES[:5].tolist(), [256, 256]])
    assert 0.1 < idle_share(dealt_costs(alone, 4)) < 0.6
    assert idle_share(dealt_costs(alone, 1)) == 0
    short = plan_epoch(np.zeros(9, dtype=int), 2, world_size=4, bucket_sizes=SIZES[:1], step_shapes="one")
    # 8 images fill a step; the ninth is trained by all four ranks, so nobody waits.
    assert idle_share_of(short) == 0


REFUSED = [
    {"batch_size": 0}, {"batch_size": 2.5}, {"batch_size": []}, {"batch_size": None}, {"batch_size": [1, 2]},
    {"world_size": 0},
    {"epoch": -1}, {"epoch": 1.5}, {"seed": None}, {"seed": 1.5}, {"remainder": "lose"}, {"remainder": "merge"},
    {"remainder": "catch_all"}, {"order": "random"}, {"repeats": -1}, {"repeats": [1, 2]}, {"repeats": float("nan")},
    {"repeats": -0.5}, {"repeats": 2**40}, {"repeats": 1e30}, {"repeats": np.full(len(IDS), 2**40)},
    {"repeats": 2**30}, {"repeats": np.full(len(IDS), 2**30)}, {"regularization_uses": 3}, {"regularization": [True]},
    {"regularization": IDS > 0, "regularization_uses": -3}, {"regularization": IDS > 0, "regularization_uses": 1.5},
    {"resolution_mode": "all"}, {"resolution_weights": [1]}, {"base_bucket": 7}, {"base_bucket": "512x512"},
    {"bucket_groups": [0]}, {"done": [(3, 99)]}, {"done": [(0, 1)]}, {"done": [(4,)]}, {"bucket_ids": [[0, 1]]},
    {"bucket_ids": [-2]}, {"bucket_ids": [0.5]}, {"bucket_ids": [0, 2**31 - 1]}, {"merge_max_crop": float("nan")},
    {"merge_max_crop": 25}, {"merge_max_crop": None}, {"max_pixels": "1000000", "bucket_sizes": SIZES},
    {"max_pixels": 1e6, "bucket_sizes": SIZES}, {"max_tokens": 0, "bucket_tokens": [1, 1, 1]},
    {"bucket_tokens": [1, 0, 1]}, {"bucket_tokens": [1.5, 1, 1]}, {"token_cost": (1, -1)}, {"token_cost": 3},
    {"bucket_tokens": [1, 1, 1], "token_cost": "12"},
]  # fmt: skip


@pytest.mark.parametrize("arguments", REFUSED, ids=str)
def test_values_from_which_no_plan_follows_are_refused(arguments: dict) -> None:
    with pytest.raises(PlanError):
        plan_epoch(**{"bucket_ids": IDS, "batch_size": 3, **arguments})


def test_a_refusal_says_what_the_value_is_and_what_it_must_be() -> None:
    with pytest.raises(PlanError, match="max_tokens is 0, but must be a whole number, 1 or more"):
        plan_epoch(IDS, 3, max_tokens=0, bucket_tokens=[1, 1, 1])
    with pytest.raises(PlanError, match="remainder is 'lose'"):
        plan_epoch(IDS, 3, remainder="lose")
    with pytest.raises(PlanError, match="15,032,385,536 images"):
        plan_epoch(IDS, 3, repeats=2**30)


def test_access_beyond_the_plan_is_refused() -> None:
    plan = plan_epoch(IDS, 3, world_size=2)
    with pytest.raises(PlanError, match="step 99"):
        plan.indices(99, 0)
    with pytest.raises(PlanError, match="rank 2 does not exist"):
        plan.indices(0, 2)
    assert plan_epoch([], 3).steps == 0
    assert plan_epoch([-1, -1], 3).ledger().missed == 2


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int8])
def test_bucket_numbers_of_every_integer_type_give_one_plan(dtype) -> None:
    ids = np.array([0, 1, 0, 2, 0, 1, 0, 0, 2])
    plan, other = (EpochPlanner(i, 2, repeats=2).plan(7) for i in (ids, ids.astype(dtype)))
    assert other.hash == plan.hash
    assert other.fingerprint == plan.fingerprint


RAGGED = [[1], [1, 2]]


@pytest.mark.parametrize(
    "name", ["shards", "bucket_tokens", "repeats", "bucket_sizes", "regularization", "batch_size", "bucket_groups"]
)
def test_rows_of_different_lengths_are_no_array(name) -> None:
    order = {"order": "local"} if name == "shards" else {}
    arguments = {"bucket_ids": [0] * 8, "batch_size": 4, **order, name: RAGGED}
    with pytest.raises(KohyaBucketError, match=r"is \[\[1\], \[1, 2\]\], but must be an array of numbers"):
        plan_epoch(**arguments)


@pytest.mark.parametrize("value", [True, 1, np.True_])
def test_a_flag_may_be_numpys(value: object) -> None:
    assert plan_epoch([0, 0, 1], 2, equal_epochs=value).steps == plan_epoch([0, 0, 1], 2, equal_epochs=True).steps


@given(st.lists(st.integers(0, 1 << 20), max_size=60))
def test_large_bucket_numbers_are_sorted_as_numpy_sorts_them(ids: list[int]) -> None:
    array = np.array(ids, dtype=np.int32)
    assert _stable_order(array).tolist() == np.argsort(array, kind="stable").tolist()


def test_an_image_that_has_one_resolution_counts_in_the_period() -> None:
    ids = np.array([[0, 1], [0, -1], [-1, -1]])
    assert DemandModel(ids, 2, PlanOptions(resolution_mode="rotate")).distinct_epochs() == range(2)
