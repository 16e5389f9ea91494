"""What holds for every plan, whatever the remainder policy, the order and the number of ranks."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import SIZES, asked, assert_all_is_accounted_for, cases, plan_epoch, trained, with_effect

from kohya_bucket import PlanError, ResumeError
from kohya_bucket.planning import (
    ORDERS,
    REMAINDERS,
    EpochPlan,
    EpochPlanner,
    EpochPosition,
    LedgerReason,
    batches,
    demand_model,
    never_full,
)
from kohya_bucket.planning.demand_model import Repeats
from kohya_bucket.planning.options import STEP_SHAPES
from kohya_bucket.planning.plan import rank_costs
from kohya_bucket.planning.resolutions import weighted_cycle
from kohya_bucket.planning.stream import Purpose, stream

every_policy = pytest.mark.parametrize("remainder", list(REMAINDERS))
any_order = st.sampled_from(list(ORDERS))
every_order = pytest.mark.parametrize("order", list(ORDERS))


@every_policy
@given(case=cases(), order=any_order)
def test_every_rank_every_step_every_image(remainder: str, order: str, case: dict) -> None:
    plan = plan_epoch(**case, remainder=remainder, order=order)
    ids, world = case["bucket_ids"], plan.world_size

    # One bucket per step, at least one image per rank, ranks differ by at most one image.
    for s in range(plan.steps):
        shares = [plan.indices(s, r) for r in range(world)]
        assert min(map(len, shares)) >= 1
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert np.concatenate(shares).tolist() == plan.step_indices(s).tolist()
        assert len(plan.step_indices(s)) <= max(world, plan.global_batch[plan.bucket_of_step[s]])
        if not plan.moves:
            assert set(ids[plan.step_indices(s)].tolist()) == {int(plan.bucket_of_step[s])}

    assert_all_is_accounted_for(plan, case)
    assert plan.accumulate * (plan.updates - 1) < plan.steps <= plan.accumulate * plan.updates
    ledger = plan.ledger()
    assert ledger.count(LedgerReason.NO_BUCKET) == asked(plan)[ids < 0].sum()
    assert (ledger.bucket[ledger.reason == LedgerReason.NO_BUCKET] == -1).all()

    # The fast iterator is the same plan.
    for r in range(min(world, 3)):
        assert list(plan.rank_batches(r)) == [plan.indices(s, r).tolist() for s in range(plan.steps)]


@every_policy
@given(case=cases(), order=any_order, data=st.data())
def test_the_images_of_a_step_do_not_depend_on_the_number_of_ranks(remainder, order, case, data) -> None:
    case["batch_size"] = 8 * data.draw(st.integers(1, 2))
    plans = [
        plan_epoch(
            **{**case, "world_size": world, "batch_size": case["batch_size"] // world}, remainder=remainder, order=order
        )
        for world in (1, 2, 4, 8)
    ]
    assert len({p.steps for p in plans}) == 1
    for s in range(plans[0].steps):
        alone = sorted(plans[0].step_indices(s).tolist())
        for plan in plans[1:]:
            together = plan.step_indices(s).tolist()
            assert set(together) == set(alone)
            if len(alone) >= plan.world_size:
                assert sorted(together) == alone


@given(case=cases())
def test_keep_makes_as_many_batches_as_sd_scripts(case: dict) -> None:
    case.update(world_size=1, regularization=None)
    times = case["repeats"]
    if not (times is None or isinstance(times, int)):
        times = case["repeats"] = 2
    plan = plan_epoch(**case, remainder="keep")
    ids = case["bucket_ids"]
    for k in range(len(case["bucket_sizes"])):
        images = np.count_nonzero(ids == k) * (times or 1)
        assert np.count_nonzero(plan.bucket_of_step == k) == -(-images // plan.global_batch[k])
    assert plan.ledger().repeated == 0


@every_policy
@given(case=cases())
def test_full_batches_and_nothing_lost(remainder: str, case: dict) -> None:
    plan = plan_epoch(**case, remainder=remainder)
    ledger = plan.ledger()
    short = plan.length < plan.global_batch[plan.bucket_of_step]
    policy = REMAINDERS[remainder]
    assert policy.moves_images or not plan.moves
    assert policy.leaves_out or ledger.missed == ledger.count(LedgerReason.NO_BUCKET)
    if remainder == "pad":
        assert not short.any()
    if remainder == "drop":  # except of buckets that never fill a batch, which are kept
        own = {k: v for k, v in case.items() if k not in ("seed", "epoch")}
        planner = EpochPlanner(**with_effect(own | {"remainder": remainder}))
        demand = planner.demand_model.for_epoch(plan.seed, plan.epoch).demand
        assert set(plan.bucket_of_step[short]) <= set(np.flatnonzero(demand.per_bucket() < plan.global_batch))
        full = plan_epoch(**case, remainder=remainder, small_buckets="drop")
        assert (full.length == full.global_batch[full.bucket_of_step]).all()
    if remainder == "catch_all":
        assert short.sum() <= 1
    if remainder == "merge":
        kept = plan_epoch(**case, remainder="keep")
        assert short.sum() <= (kept.length < kept.global_batch[kept.bucket_of_step]).sum()
    if remainder != "pad":
        assert ledger.repeated == ledger.count(LedgerReason.RANK_FILLED)


@given(case=cases())
def test_repeats_of_an_image_meet_only_where_they_must(case: dict) -> None:
    case["world_size"] = 1
    plan = plan_epoch(**case)
    counts = trained(plan)
    batches = np.bincount(plan.bucket_of_step, minlength=len(SIZES))
    full = np.bincount(plan.bucket_of_step[plan.length == plan.global_batch[plan.bucket_of_step]], minlength=len(SIZES))
    for s in range(plan.steps):
        k = plan.bucket_of_step[s]
        images, times = np.unique(plan.step_indices(s), return_counts=True)
        enough = counts[images] <= full[k]
        in_bucket = case["bucket_ids"] == k
        if counts[in_bucket].max() <= full[k]:
            assert enough.all()
            assert (times == 1).all()
        elif batches[k] == full[k]:
            assert (times <= -(-counts[images] // full[k])).all()


@given(times=st.lists(st.integers(1, 9), min_size=2, max_size=6), size=st.integers(2, 5))
def test_few_images_repeated_often_are_dealt_out_evenly(times: list[int], size: int) -> None:
    times[-1] += -sum(times) % size  # all batches are full
    plan = plan_epoch([0] * len(times), size, repeats=times)
    for s in range(plan.steps):
        images, copies = np.unique(plan.step_indices(s), return_counts=True)
        assert (copies <= -(-np.array(times)[images] // plan.steps)).all()


@given(case=cases(), world=st.integers(1, 4))
def test_every_bucket_is_spread_evenly(case: dict, world: int) -> None:
    case["world_size"] = world
    plan = plan_epoch(**case, order="shuffled")
    per_bucket = np.bincount(plan.bucket_of_step, minlength=1)
    present = np.count_nonzero(per_bucket)
    for k in np.flatnonzero(per_bucket):
        m, total = per_bucket[k], plan.steps
        done = np.concatenate([[0], np.cumsum(plan.bucket_of_step == k)])
        even = np.arange(total + 1) * m / total
        assert np.abs(done - even).max() <= 1 + present * m / total + 1e-9


@given(case=cases())
def test_runs_are_as_long_as_asked(case: dict) -> None:
    plan = plan_epoch(**case, order="runs")
    run = case["run_length"]
    starts = np.flatnonzero(np.diff(plan.bucket_of_step, prepend=-1))
    runs = np.diff(np.append(starts, plan.steps))
    per_bucket = np.bincount(plan.bucket_of_step, minlength=1)
    assert len(starts) <= (-(-per_bucket // run)).sum()
    for k in np.flatnonzero(per_bucket):
        lengths = runs[plan.bucket_of_step[starts] == k]
        assert np.count_nonzero(lengths % run) <= 1


@given(
    case=cases(),
    order=st.sampled_from([name for name in ORDERS if name != "local"]),
    step_shapes=st.sampled_from([*STEP_SHAPES]),
)
def test_the_costliest_batch_of_each_shape_comes_first(case: dict, order: str, step_shapes: str) -> None:
    case |= {"step_shapes": step_shapes, "order": order, "repeats": None}
    usual, first = plan_epoch(**case), plan_epoch(**case, largest_first=True)
    ranks = range(usual.world_size)
    steps = [
        sorted(tuple(tuple(plan.indices(s, r).tolist()) for r in ranks) for s in range(plan.steps))
        for plan in (usual, first)
    ]
    assert steps[0] == steps[1]  # the same steps, each once
    buckets, costs = np.stack([first.rank_buckets(r) for r in ranks], axis=1), rank_costs(first)
    shapes = np.unique(buckets)
    head = len(shapes)
    for k in shapes.tolist():
        assert costs[:head][buckets[:head] == k].max() == costs[buckets == k].max()
    assert first.steps == 0 or costs[0].max() == costs.max()


def test_a_rank_and_not_the_step_says_what_is_costly() -> None:
    """One large image, which all ranks train, and five small ones, one for each rank."""
    options = {"bucket_sizes": [(192, 192), (96, 128)], "largest_first": True, "step_shapes": "one"}
    ids = [0, 1, 1, 1, 1, 1]
    assert plan_epoch(ids, 1, world_size=5, **options).bucket_of_step.tolist() == [0, 1]
    assert plan_epoch(ids, 5, **options).bucket_of_step.tolist() == [1, 0]
    rest = plan_epoch(ids, 5, done=[(5, 1, 5)], **options)  # five ranks have trained the large one
    assert [rest.bucket_of_step.tolist(), sorted(rest.indices(0, 0).tolist())] == [[1], [1, 2, 3, 4, 5]]


def steps_of(plan: EpochPlan) -> list[list[list[int]]]:
    """What each rank trains in each step."""
    return [[plan.indices(s, r).tolist() for r in range(plan.world_size)] for s in range(plan.steps)]


@st.composite
def begun_runs(draw: st.DrawFn) -> tuple[dict, EpochPosition]:
    """Arguments of an `EpochPlanner`, and where its run begins."""
    order = draw(any_order)
    case = draw(cases()) | {"order": order}
    case["step_shapes"] = "one" if order == "local" else draw(st.sampled_from([*STEP_SHAPES]))
    begin = EpochPosition(case.pop("seed"), case.pop("epoch"))
    return with_effect(case) | {"first_epoch": begin.epoch}, begin


@given(run=begun_runs(), more=st.integers(1, 3))
def test_a_run_begins_with_the_batch_that_needs_most_memory(run: tuple[dict, EpochPosition], more: int) -> None:
    case, begin = run
    planner = EpochPlanner(**case)
    plan, usual = planner.plan_at(begin), planner.plan(begin.seed, begin.epoch)
    steps, costs = steps_of(usual), rank_costs(usual).max(axis=1, initial=0)
    first = int(costs.argmax()) if len(costs) and ORDERS[case["order"]].shuffles else 0
    assert steps_of(plan) == steps[first : first + 1] + steps[:first] + steps[first + 1 :]
    assert str(plan.ledger()) == str(usual.ledger())

    # Later epochs, and this one where the option is set, are what `plan_epoch` makes of them.
    assert planner.plan_at(EpochPosition(begin.seed, begin.epoch + more)).hash == (
        planner.plan(begin.seed, begin.epoch + more).hash
    )
    assert EpochPlanner(**case, largest_first=False).plan_at(begin).hash == usual.hash
    if case["order"] != "local":
        chosen = EpochPlanner(**case, largest_first=True)
        assert chosen.plan_at(begin).hash == chosen.plan(begin.seed, begin.epoch).hash


@given(run=begun_runs(), ranks=st.integers(1, 4), data=st.data())
def test_a_run_goes_on_as_it_was_begun(run: tuple[dict, EpochPosition], ranks: int, data: st.DataObject) -> None:
    """On the same ranks with the next step, also if the option was set or taken away; on others with what is left."""
    case, begin = run
    usual, plain = EpochPlanner(**case), EpochPlanner(**case, largest_first=False)
    for planner, other in ((usual, plain), (plain, usual)):
        plan = planner.plan_at(begin)
        step = data.draw(st.integers(1, plan.steps)) if plan.steps else 0
        state = json.loads(json.dumps(planner.position(begin, step).state_dict(planner.fingerprint)))
        assert planner is usual or "begun_with" not in state  # as states were before runs began so
        for resumed in (planner, other) if step else ():
            position = EpochPosition.from_state_dict(state, resumed.fingerprint)
            assert steps_of(resumed.plan_at(position)) == steps_of(plan)[step:]
            assert position == planner.position(begin, step) == planner.position(planner.position(begin, 1), step)
        if step:
            elsewhere = EpochPlanner(**case | {"world_size": ranks})
            rest = elsewhere.plan_at(EpochPosition.from_state_dict(state, elsewhere.fingerprint))
            left = np.concatenate([plan.items[:0], *(own_images(plan, s) for s in range(step, plan.steps))])
            assert (asked(rest) == np.bincount(left, minlength=plan.images)).all()


def own_images(plan: EpochPlan, step: int) -> np.ndarray:
    """Those of a step, without what it repeats so that no rank is empty."""
    return plan.items[plan.start[step] : plan.start[step] + plan.length[step]]


def test_a_position_that_begins_with_a_step_that_is_not_there_is_refused() -> None:
    planner = EpochPlanner([0, 0, 1, 1], 2, bucket_sizes=SIZES[:2])
    for step, error in ((2, PlanError), (-1, ResumeError), ("1", ResumeError)):
        state = planner.position(EpochPosition(0, 0), 1).state_dict(planner.fingerprint) | {"begun_with": step}
        with pytest.raises(error, match=r"begun_with|begin with"):
            planner.plan_at(EpochPosition.from_state_dict(state, planner.fingerprint))


@every_order
@every_policy
def test_over_epochs_order_differs_and_coverage_does_not(remainder: str, order: str) -> None:
    ids = np.random.RandomState(7).choice(4, 203, p=[0.6, 0.3, 0.08, 0.02])
    settings = {"bucket_sizes": SIZES[:4], "shards": np.arange(203) // 20, "open_shards": 4}
    plans = [plan_epoch(ids, 4, world_size=2, epoch=e, remainder=remainder, order=order, **settings) for e in range(6)]
    sequences = {tuple(np.concatenate([p.step_indices(s) for s in range(p.steps)]).tolist()) for p in plans}
    if order != "file":
        assert len(sequences) == len(plans)
    assert len({p.steps for p in plans}) == 1
    totals = np.sum([trained(p) for p in plans], axis=0)
    if remainder == "keep":
        once = plan_epoch(ids, 8, remainder=remainder, order=order, **settings)
        assert (trained(once) == 1).all()
        assert (totals >= 6).all()
    if remainder in ("pad", "drop"):
        for k in range(4):
            of_bucket = totals[ids == k]
            assert of_bucket.max() - of_bucket.min() <= 1


@given(epochs=st.integers(1, 12), first=st.integers(0, 40), seed=st.integers(0, 99))
def test_fractions_are_exact_over_epochs(epochs: int, first: int, seed: int) -> None:
    ids = np.arange(30) % 3
    repeats = np.array([0.1, 2.5, 1 / 3] * 10)
    total = np.zeros(30, dtype=int)
    for e in range(first, first + epochs):
        total += trained(plan_epoch(ids, 4, seed=seed, epoch=e, repeats=repeats))
    assert (np.abs(total - repeats * epochs) < 1).all()
    for e in range(first + epochs, first + 30):
        total += trained(plan_epoch(ids, 4, seed=seed, epoch=e, repeats=repeats))
    if epochs <= 30:
        assert total.tolist() == np.round(repeats * 30).astype(int).tolist()


@given(epochs=st.integers(1, 9), first=st.integers(0, 40), seed=st.integers(0, 99))
def test_regularization_images_are_used_equally(epochs: int, first: int, seed: int) -> None:
    ids = np.arange(40) % 3
    mask = np.arange(40) >= 13
    total = np.zeros(40, dtype=int)
    for e in range(first, first + epochs):
        plan = plan_epoch(ids, 4, seed=seed, epoch=e, repeats=np.where(mask, 1, 1.5), regularization=mask)
        counts = trained(plan)
        assert counts[mask].sum() == counts[~mask].sum()
        total += counts
    assert total[mask].max() - total[mask].min() <= 1


def test_resolutions() -> None:
    ids = np.stack([np.arange(60) % 3, 3 + np.arange(60) % 2], axis=1)
    ids[0, 1] = -1
    both = plan_epoch(ids, 4, resolution_mode="all")
    assert trained(both).tolist() == [1] + [2] * 59
    seen = np.zeros((60, 5), dtype=int)
    for e in range(4):
        plan = plan_epoch(ids, 4, resolution_mode="rotate", epoch=e)
        assert plan.asked == 60
        assert (trained(plan) == 1).all()
        for s in range(plan.steps):
            seen[plan.step_indices(s), plan.bucket_of_step[s]] += 1
    assert seen[1:, :3].sum(axis=1).tolist() == seen[1:, 3:].sum(axis=1).tolist() == [2] * 59
    assert seen[0, :3].sum() == 4
    shares = np.zeros((60, 2), dtype=int)
    for e in range(4):
        plan = plan_epoch(ids, 4, resolution_mode="weighted", resolution_weights=[3, 1], epoch=e)
        assert 13 <= sum(plan.length[plan.bucket_of_step >= 3]) <= 17
        for s in range(plan.steps):
            shares[plan.step_indices(s), int(plan.bucket_of_step[s] >= 3)] += 1
    assert shares[1:].tolist() == [[3, 1]] * 59


@given(first=st.integers(1, 19), second=st.integers(1, 19))
def test_two_resolutions_are_never_half_a_turn_off_their_shares(first: int, second: int) -> None:
    cycle = weighted_cycle([first, second], 2)
    assert cycle is not None
    turns = np.cumsum(cycle == 0) * (first + second)
    assert (2 * np.abs(turns - np.arange(1, len(cycle) + 1) * first) <= first + second).all()


def test_a_schedule_trains_one_resolution_after_another() -> None:
    ids = np.stack([np.arange(60) % 3, 3 + np.arange(60) % 2, np.full(60, 5)], axis=1)
    ids[0, 1] = -1
    for epoch, column in enumerate([0, 0, 1, 2, 2]):
        plan = plan_epoch(ids, 4, resolution_mode="schedule", resolution_epochs=[2, 1], epoch=epoch)
        assert (trained(plan) == 1).all()
        for s in range(plan.steps):
            at = ids[plan.step_indices(s)]
            assert (plan.bucket_of_step[s] == np.where(at[:, column] < 0, at[:, 2], at[:, column])).all()


@given(
    lengths=st.lists(st.integers(1, 3), min_size=1, max_size=2), per_stage=st.integers(6, 30),
    ranks=st.sampled_from([1, 2, 3]), shapes=st.sampled_from(list(STEP_SHAPES)), unplaced=st.booleans(),
)  # fmt: skip
def test_stages_train_every_image_in_the_epochs_of_its_own_and_all_have_equal_steps(
    lengths, per_stage, ranks, shapes, unplaced
) -> None:
    """Which is what datasets of several resolutions are: here, buckets 0 to 2 for the first, 3 to 5 for the next, …"""
    stages = np.repeat(np.arange(len(lengths) + 1), per_stage)
    ids = 3 * stages + np.arange(len(stages)) % 3
    if unplaced:
        ids[::per_stage] = -1
    options = {"stages": stages, "resolution_mode": "schedule", "resolution_epochs": lengths, "step_shapes": shapes}
    planner = EpochPlanner(ids, 2, world_size=ranks, equal_epochs=True, bucket_sizes=[(64, 64)] * 9, **options)
    first = planner.plan(3, 0)
    for epoch in range(sum(lengths) + 2):
        plan, stage = planner.plan(3, epoch), int(np.searchsorted(np.cumsum(lengths), epoch, side="right"))
        mine = stages == stage
        assert (trained(plan)[mine & (ids >= 0)] >= 1).all()
        assert not trained(plan)[~mine | (ids < 0)].any()
        assert plan.ledger().missed == np.count_nonzero(ids[mine] < 0)
        assert plan.asked == per_stage
        assert plan.steps == first.steps


def test_stages_go_on_in_the_middle_of_one_on_another_number_of_ranks() -> None:
    stages, ids = np.arange(40) % 2, np.arange(40) % 2
    options = {"stages": stages, "resolution_mode": "schedule", "resolution_epochs": [1], "equal_epochs": True}
    before = EpochPlanner(ids, 2, world_size=2, **options)
    rest = EpochPlanner(ids, 2, **options).plan(0, 1, done=[(4, 3, 2)])
    done = np.concatenate([before.plan(0, 1).step_indices(step) for step in range(3)])
    left = np.concatenate([rest.step_indices(step) for step in range(rest.steps)])
    assert sorted([*done.tolist(), *left.tolist()]) == np.flatnonzero(stages == 1).tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"stages": [0, 1]},
            "stages is int.. of shape .2., but must be a whole number from 0 to 1 for each of 8 images",
        ),
        ({"stages": [-1] * 8}, "a whole number from 0 to 1"),
        ({"stages": [2] * 8}, "a whole number from 0 to 1"),
        ({"stages": [0] * 8}, r"stage 2 trains too few images in an epoch \(0\) for the 4 steps"),
        ({"stages": [0, 1] * 4, "regularization": np.arange(8) > 5}, "stages is set with regularization"),
        ({"stages": [0] + [1] * 7}, r"stage 1 trains too few images in an epoch \(1\) for the 4 steps of another"),
    ],
)
def test_stages_that_cannot_be_are_refused(options, message) -> None:
    with pytest.raises(PlanError, match=message):
        plan_epoch([0] * 8, 2, resolution_mode="schedule", resolution_epochs=[2], equal_epochs=True, **options)


def test_an_epoch_of_a_stage_reads_few_shards_at_a_time() -> None:
    stages, shards = np.repeat([0, 1], 60), np.arange(120) // 10
    options = {"stages": stages, "resolution_mode": "schedule", "resolution_epochs": [1], "equal_epochs": True}
    for stage in range(2):
        plan = plan_epoch([0] * 120, 2, epoch=stage, order="local", shards=shards, open_shards=2, **options)
        assert (trained(plan) == (stages == stage)).all()
        assert max(len(np.unique(shards[plan.step_indices(step)])) for step in range(plan.steps)) <= 2


def test_images_of_many_ratios_are_gone_through_once_and_not_once_a_ratio(monkeypatch):
    drawn = []

    def counted(purpose, *rest):
        drawn.append(purpose)
        return stream(purpose, *rest)

    monkeypatch.setattr(demand_model, "stream", counted)
    numerator, denominator = np.arange(400) // 2, 1 + np.arange(400) // 2 % 7
    phase = Repeats(400, numerator, denominator)._phase(5)
    assert drawn.count(Purpose.PHASES) == 1
    for pair in range(200):  # two images of one ratio stand half a cycle apart
        assert sorted(phase[2 * pair : 2 * pair + 2].tolist()) == [0, (1 + pair % 7) // 2]


def test_repeats_that_meet_are_gone_through_once_and_not_once_a_bucket(monkeypatch):
    crowded = batches._crowded_batches
    asked = []

    class Counted(np.ndarray):
        def __getitem__(self, key):
            asked.append(np.size(key) if isinstance(key, np.ndarray) else 0)
            return super().__getitem__(key)

    monkeypatch.setattr(batches, "_crowded_batches", lambda *of: crowded(*of).view(Counted))
    plan = plan_epoch(np.arange(40), 4, repeats=10)
    assert trained(plan).tolist() == [10] * 40
    assert sum(asked) < 500  # of 120 batches


def test_rounds_of_more_epochs_than_anybody_trains_are_not_gone_through():
    has = np.arange(50) <= np.arange(50)[:, None]  # image i has i + 1 resolutions
    ids = np.where(has, 0, -1)
    planner = EpochPlanner(ids, 4, resolution_mode="rotate", remainder="drop", step_shapes="one")
    assert planner.demand_model.distinct_epochs() is None
    assert never_full(planner).tolist() == []
    with pytest.raises(PlanError, match="many different numbers of resolutions"):
        EpochPlanner(ids, 4, resolution_mode="rotate", equal_epochs=True)
