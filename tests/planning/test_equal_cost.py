"""step_shapes="equal_cost": what holds for every plan in which batches of several buckets meet in a step."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import SIZES, asked, assert_all_is_accounted_for, cases, plan_epoch, with_effect

from kohya_bucket.errors import PlanError
from kohya_bucket.planning import (
    ORDERS,
    REMAINDERS,
    EpochPlan,
    EpochPlanner,
    EpochPosition,
    LedgerReason,
    lost_share_of,
    trained_cost,
)

every_policy = pytest.mark.parametrize("remainder", list(REMAINDERS))
any_order = st.sampled_from([name for name, order in ORDERS.items() if not order.uses_shards])
TOKENS = [1024, 4096, 1000, 960, 14040, 7]


@st.composite
def by_cost(draw: st.DrawFn) -> dict:
    case = draw(cases())
    case["step_shapes"] = "equal_cost"
    if draw(st.booleans()):
        case["bucket_tokens"] = TOKENS[: len(case["bucket_sizes"])]
        case["token_cost"] = (1, draw(st.sampled_from([0, 1e-4, 1])))
    return case


def shares(plan: EpochPlan, step: int) -> list[np.ndarray]:
    return [plan.indices(step, rank) for rank in range(plan.world_size)]


@every_policy
@given(case=by_cost(), order=any_order)
def test_every_rank_every_step_every_image(remainder: str, order: str, case: dict) -> None:
    plan = plan_epoch(**case, remainder=remainder, order=order)
    ids, world = case["bucket_ids"], plan.world_size
    for s in range(plan.steps):
        parts = shares(plan, s)
        assert min(map(len, parts)) >= 1
        assert np.concatenate(parts).tolist() == plan.step_indices(s).tolist()
        for rank, images in enumerate(parts):
            k = plan.bucket(s, rank)
            assert k == plan.rank_buckets(rank)[s]
            assert len(images) <= max(1, plan.global_batch[k] // world)
            if not plan.moves:
                assert set(ids[images].tolist()) == {k}
    assert_all_is_accounted_for(plan, case)
    for r in range(min(world, 3)):
        assert list(plan.rank_batches(r)) == [plan.indices(s, r).tolist() for s in range(plan.steps)]
        assert plan.rank_lengths(r).tolist() == [len(plan.indices(s, r)) for s in range(plan.steps)]


@given(case=by_cost())
def test_fewer_repeats_than_ranks_and_no_more_steps(case: dict) -> None:
    """One shape per step repeats up to ranks - 1 images of every bucket, for a step of its own."""
    plan, one_shape = plan_epoch(**case), plan_epoch(**{**case, "step_shapes": "one"})
    again = plan.ledger().count(LedgerReason.RANK_FILLED)
    assert again < plan.world_size
    assert not again or (plan.length[plan.bucket_of_step >= 0] - plan.world_size < again).all()
    assert again <= one_shape.ledger().count(LedgerReason.RANK_FILLED)
    assert plan.steps <= one_shape.steps
    if case["world_size"] == 1:
        assert plan.hash == one_shape.hash


@given(case=by_cost())
def test_ranks_of_a_mixed_step_are_neighbours_by_cost(case: dict) -> None:
    """Between the largest and the smallest cost of a step lies no batch of another mixed one."""
    plan = plan_epoch(**case)
    own, cost = plan.mixed.length > 0, plan.item_costs[plan.mixed.bucket] * plan.mixed.length
    bounds = [(c[o].min(), c[o].max()) for c, o in zip(cost, own, strict=True)]
    assert sorted(-plan.bucket_of_step[plan.bucket_of_step < 0] - 1) == list(range(len(bounds)))
    for (low, _), (_, high) in itertools.pairwise(bounds):
        assert low >= high
    # Where a bucket has a batch for every rank, they meet in a step of one bucket.
    per_rank = plan.global_batch // plan.world_size
    for s in np.flatnonzero(plan.bucket_of_step >= 0).tolist():
        assert -(-plan.length[s] // per_rank[plan.bucket_of_step[s]]) == plan.world_size


@every_policy
@given(case=st.one_of(cases(), by_cost()))
def test_the_average_of_ranks_is_the_mean_of_the_batch(remainder: str, case: dict) -> None:
    """Each training of the batch has an equal part in a step's update, one that fills several ranks in all of them."""
    plan = plan_epoch(**case, remainder=remainder)
    unequal = 0
    for step in range(plan.steps):
        part = dict.fromkeys(plan.step_indices(step).tolist(), 0.0)
        scales = [plan.loss_scale(step, rank) for rank in range(plan.world_size)]
        unequal += any(not math.isclose(scale, 1) for scale in scales)
        for rank, images in enumerate(shares(plan, step)):
            for image in images.tolist():
                part[image] += scales[rank] / len(images) / plan.world_size
        batch = plan.items[plan.start[step] : plan.start[step] + plan.length[step]].tolist()
        for image in part:
            assert math.isclose(part[image], batch.count(image) / len(batch), rel_tol=1e-12)
    assert plan.unequal_steps >= unequal


@every_policy
@given(case=by_cost(), data=st.data())
def test_resume_on_as_many_ranks_goes_on_with_the_next_step(remainder: str, case: dict, data: st.DataObject) -> None:
    case["remainder"] = remainder
    planner = EpochPlanner(**with_effect({k: v for k, v in case.items() if k not in ("seed", "epoch")}))
    whole = planner.plan(case["seed"], case["epoch"])
    stop = data.draw(st.integers(0, whole.steps))
    position = planner.position(EpochPosition(case["seed"], case["epoch"]), stop)
    state = json.loads(json.dumps(position.state_dict(planner.fingerprint)))
    position = EpochPosition.from_state_dict(state, planner.fingerprint)
    rest = planner.plan(position.seed, position.epoch, position.done)
    assert (rest.first_step, rest.steps) == (stop, whole.steps - stop)
    for s in range(rest.steps):
        for r in range(whole.world_size):
            assert rest.indices(s, r).tolist() == whole.indices(stop + s, r).tolist()
            assert rest.bucket(s, r) == whole.bucket(stop + s, r)


@every_policy
@given(case=by_cost(), data=st.data())
def test_another_number_of_ranks_trains_what_is_left(remainder: str, case: dict, data: st.DataObject) -> None:
    """With the same images per step or others: 12 on 2 ranks, then on 4, then 20 on 5."""
    case.update(remainder=remainder)
    done, seen, part = [], np.zeros(len(case["bucket_ids"]), dtype=int), None
    for batch, world in ((6, 2), (3, 4), (4, 5), (4, 5)):
        plan = plan_epoch(**{**case, "batch_size": batch, "world_size": world}, done=done)
        part = plan if part is None else part
        steps = data.draw(st.integers(0, plan.steps))
        done.append((batch * world, steps, world))
        for s in range(steps):
            seen += np.bincount(plan.step_indices(s)[: plan.length[s]], minlength=plan.images)
    plan = plan_epoch(**{**case, "batch_size": 4, "world_size": 5}, done=done)
    left = asked(plan)
    assert left.sum() == plan.asked
    if remainder not in ("drop", "pad"):
        assert (seen + left).tolist() == np.bincount(part.items, minlength=plan.images).tolist()


@given(case=by_cost(), mode=st.sampled_from(["rotate", "weighted"]))
def test_equal_epochs_are_equally_long(case: dict, mode: str) -> None:
    ids, k = case["bucket_ids"], len(case["bucket_sizes"])
    several = np.stack([ids, np.where(ids < 0, -1, (ids + 1) % k), np.where(ids % 3 == 1, -1, ids)], axis=1)
    case.update(bucket_ids=several, resolution_mode=mode, repeats=None, regularization=None, equal_epochs=True)
    if mode == "weighted":
        case["resolution_weights"] = [2, 1, 1]
    epochs = [plan_epoch(**{**case, "epoch": e}) for e in range(12)]
    assert len({plan.steps for plan in epochs}) == 1
    for plan in epochs:
        assert (asked(plan) == 1).all()


def test_ranks_wait_less_and_train_no_image_twice() -> None:
    ids = np.random.RandomState(3).choice(len(SIZES), 400, p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1])
    one, met = (plan_epoch(ids, 4, world_size=8, bucket_sizes=SIZES, step_shapes=how) for how in ("one", "equal_cost"))
    assert (one.ledger().repeated, met.ledger().repeated) == (11, 0)
    assert met.steps < one.steps
    assert lost_share_of(met) < lost_share_of(one)


def test_a_step_is_cut_up_before_an_image_is_repeated() -> None:
    plan = plan_epoch(np.zeros(7, int), 2, world_size=3)
    assert [len(plan.indices(s, r)) for s in range(plan.steps) for r in range(3)] in (
        [2, 1, 1, 1, 1, 1],
        [1, 1, 1, 2, 1, 1],
    )
    assert plan.ledger().repeated == 0
    rest = plan_epoch(np.zeros(11, int), 2, world_size=3, done=[(4, 1, 2)])  # one step on two ranks was trained
    assert (rest.steps, rest.ledger().repeated) == (2, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"step_shapes": "any"}, "step_shapes is 'any'"),
        ({"step_shapes": True}, "step_shapes is True"),
        (
            {"step_shapes": "equal_cost", "bucket_tokens": [1, 2], "order": "local", "shards": [0, 0, 0]},
            "step_shapes is 'equal_cost' and order is 'local'",
        ),
        (
            {"step_shapes": "equal_cost", "bucket_tokens": [1, 2], "world_size": 2, "done": [(6, 1, 4)]},
            "global batch is 6, but must be a multiple of the 4 ranks that trained it",
        ),
    ],
)
def test_what_is_refused(options: dict, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_epoch([0, 1, 0], 3, **options)


def test_a_golden_plan() -> None:
    ids = np.arange(23) % 5
    plan = plan_epoch(ids, 2, world_size=3, seed=42, bucket_tokens=[9, 3, 8, 5, 2], step_shapes="equal_cost")
    assert [[plan.indices(s, r).tolist() for r in range(3)] for s in range(plan.steps)] == [
        [[3], [8], [13]],
        [[11, 6], [21, 1], [16]],
        [[0, 5], [20, 15], [10]],
        [[18], [19, 9], [4, 14]],
        [[22, 7], [2, 17], [12]],
    ]
    assert plan.bucket_of_step.tolist() == [-1, 1, 0, -2, 2]
    assert [[plan.bucket(s, r) for r in range(3)] for s in (0, 3)] == [[3, 3, 3], [3, 4, 4]]


@pytest.mark.parametrize("step_shapes", ["one", "equal_cost"])
@pytest.mark.parametrize("images", range(1, 14))
def test_steps_are_counted_whose_images_weigh_differently(step_shapes: str, images: int) -> None:
    plan = plan_epoch(np.zeros(images, int), 2, world_size=4, bucket_sizes=[(64, 64)], step_shapes=step_shapes)
    scales = [[plan.loss_scale(step, rank) for rank in range(4)] for step in range(plan.steps)]
    assert plan.unequal_steps == sum(any(scale != 1 for scale in step) for step in scales)


def test_numbers_beyond_floats_are_refused_as_token_cost() -> None:
    with pytest.raises(PlanError, match="token_cost is"):
        plan_epoch([0, 0], 2, token_cost=(10**400, 0))


def test_what_the_rest_of_an_epoch_costs_falls_with_every_step() -> None:
    ids, options = np.repeat(np.arange(4), [9, 2, 3, 2]), {"bucket_tokens": [9, 3, 8, 5], "step_shapes": "equal_cost"}
    whole = plan_epoch(ids, 2, world_size=3, **options)
    assert (whole.bucket_of_step < 0).any()
    costs = [
        trained_cost(plan_epoch(ids, 2, world_size=3, done=[(6, k, 3)], **options)) for k in range(whole.steps + 1)
    ]
    assert all(after < before for before, after in itertools.pairwise(costs))
    assert (costs[0], costs[-1]) == (trained_cost(whole), 0.0)
