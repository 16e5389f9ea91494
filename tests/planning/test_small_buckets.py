"""Buckets that never fill a global batch, where the remainder is left out."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plan_cases import cases, plan_epoch, trained, with_effect

from kohya_bucket.errors import PlanError
from kohya_bucket.planning import REMAINDERS, EpochPlanner, never_trained

IDS = np.repeat([0, 1, 2], [9, 3, 1])


def planner_of(case: dict, **options) -> EpochPlanner:
    given = {k: v for k, v in case.items() if k not in ("seed", "epoch", "bucket_ids", "batch_size")}
    own = with_effect({**given, "remainder": "drop", **options})
    return EpochPlanner(case["bucket_ids"], case["batch_size"], **own)


@pytest.mark.parametrize("small", [None, *(name for name in REMAINDERS if name != "drop")])
@given(case=cases())
def test_two_epochs_train_every_image_that_has_a_bucket(small: str | None, case: dict) -> None:
    case.update(repeats=1 if case["repeats"] is None or not np.isscalar(case["repeats"]) else 3, regularization=None)
    planner = planner_of(case, small_buckets=small)
    assert never_trained(planner).tolist() == np.flatnonzero(case["bucket_ids"] < 0).tolist()
    plans = [planner.plan(case["seed"], case["epoch"] + e) for e in (0, 1)]
    # A small bucket that takes in others passes on some of its own: where these differ, a bucket that leaves some out
    # of what it got may leave out the same one twice.
    moved = [plan.ledger_rows[plan.ledger_rows["to_bucket"] != plan.ledger_rows["bucket"]] for plan in plans]
    assume(np.array_equal(*(np.sort(rows[["image", "to_bucket"]]) for rows in moved)))
    assert np.flatnonzero(sum(map(trained, plans)) == 0).tolist() == np.flatnonzero(case["bucket_ids"] < 0).tolist()


@given(case=cases(), epochs=st.just(4))
def test_what_is_never_trained_is_named(case: dict, epochs: int) -> None:
    case.update(repeats=None, regularization=None)
    planner = planner_of(case, small_buckets="drop")
    counts = sum(trained(planner.plan(case["seed"], e)) for e in range(epochs))
    assert np.flatnonzero(counts == 0).tolist() == never_trained(planner).tolist()


@given(case=cases())
def test_nothing_is_said_to_be_lost_that_some_epoch_trains(case: dict) -> None:
    """Fractional repeats and regularization too, of which epochs train more or less."""
    planner = planner_of(case, small_buckets="drop")
    lost = set(never_trained(planner).tolist())
    for epoch in range(6):
        assert not lost & set(np.flatnonzero(trained(planner.plan(case["seed"], epoch))).tolist())


@pytest.mark.parametrize(
    ("small", "lengths", "ledger"),
    [
        (None, [1, 3, 4, 4], "13 images, 1 missed (1 dropped with the remainder of bucket 512x512), 0 repeated"),
        ("pad", [4, 4, 4, 4], "13 images, 1 missed (1 dropped with the remainder of bucket 512x512), 4 repeated to "
         "fill 2 buckets"),
        ("merge", [3, 4, 4], "13 images, 2 missed (2 dropped with the remainder of bucket 512x512), 0 repeated, 1 "
         "trained in the next best bucket"),
        ("drop", [4, 4], "13 images, 5 missed (5 dropped with the remainder of 3 buckets), 0 repeated"),
    ],
)  # fmt: skip
def test_what_small_buckets_do(small: str | None, lengths: list, ledger: str) -> None:
    sizes = [[512, 512], [1024, 256], [576, 512]]
    plan = plan_epoch(IDS, 4, remainder="drop", small_buckets=small, bucket_sizes=sizes, merge_max_crop=0.2)
    assert sorted(plan.length.tolist()) == lengths
    assert plan.ledger().text == ledger


def test_small_is_a_bucket_of_the_whole_epoch_on_all_ranks() -> None:
    # 9 images fill a batch of 4 on two ranks, not on three; what is left after one step is not small by that.
    drop = {"remainder": "drop", "step_shapes": "one"}
    assert plan_epoch(IDS, 4, world_size=2, **drop).length.tolist().count(8) == 1
    assert sorted(plan_epoch(IDS, 4, world_size=3, **drop).length.tolist()) == [1, 3, 9]
    rest = plan_epoch(np.zeros(13, dtype=int), 5, remainder="drop", done=[(4, 2)])
    assert rest.steps == 0


def test_options_without_use_are_refused() -> None:
    with pytest.raises(PlanError, match=r"small_buckets is 'pad'.* remainder = 'drop'"):
        EpochPlanner(IDS, 4, small_buckets="pad")
    with pytest.raises(PlanError, match=r"small_buckets is 'kep'.*'keep'"):
        EpochPlanner(IDS, 4, remainder="drop", small_buckets="kep")
    with pytest.raises(PlanError, match=r"small_buckets='merge'.* bucket_sizes"):
        EpochPlanner(IDS, 4, remainder="drop", small_buckets="merge")


def test_the_sampler_says_what_it_never_trains() -> None:
    pytest.importorskip("torch", reason="the sampler is torch's")
    from kohya_bucket import BucketBatchSampler

    with pytest.warns(UserWarning, match=r"4 images .*\(2 of 3\)"):
        sampler = BucketBatchSampler(IDS, 4, drop_last=True)
    assert {len(batch) for batch in sampler} == {4}
    assert sorted(map(len, BucketBatchSampler(IDS, 4, drop_last=True, small_buckets="keep"))) == [1, 3, 4, 4]
