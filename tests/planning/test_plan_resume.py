"""A run that stops and goes on, on as many ranks as you like, trains what an uninterrupted one trains."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import SIZES, asked, cases, plan_epoch

from kohya_bucket.errors import PlanError, ResumeError
from kohya_bucket.planning import ORDERS, REMAINDERS, EpochPlanner, EpochPosition
from kohya_bucket.planning.resume import TrainedPart

every_policy = pytest.mark.parametrize("remainder", list(REMAINDERS))


@every_policy
@given(case=cases(), order=st.sampled_from(list(ORDERS)), data=st.data())
def test_resume_at_any_step_on_other_ranks(remainder: str, order: str, case: dict, data: st.DataObject) -> None:
    case.update(batch_size=4, world_size=2, remainder=remainder, order=order)
    whole = plan_epoch(**case)
    stop = data.draw(st.integers(0, whole.steps))
    for world in (1, 2, 4, 8):
        case.update(batch_size=8 // world, world_size=world)
        other = plan_epoch(**case)
        rest = plan_epoch(**case, done=[(8, stop)])
        assert rest.first_step == stop
        assert rest.steps == whole.steps - stop
        for s in range(rest.steps):
            assert rest.bucket_of_step[s] == whole.bucket_of_step[stop + s]
            for r in range(world):
                assert rest.indices(s, r).tolist() == other.indices(stop + s, r).tolist()


@every_policy
@given(case=cases(), data=st.data())
def test_resume_with_another_global_batch_trains_the_complement(remainder, case, data) -> None:
    case.update(batch_size=3, world_size=2, remainder=remainder, order=data.draw(st.sampled_from(list(ORDERS))))
    whole = plan_epoch(**case)
    before = whole
    done, seen = [], np.zeros(whole.images, dtype=int)
    for batch, world in ((1, 2), (4, 1), (5, 3)):
        steps = data.draw(st.integers(0, before.steps))
        done.append((int(before.global_batch[0]), steps))
        for s in range(steps):
            n = before.length[s]
            seen += np.bincount(before.step_indices(s)[:n], minlength=whole.images)
        case.update(batch_size=batch, world_size=world)
        before = plan_epoch(**case, done=done)
    left = asked(before)
    assert left.sum() == before.asked
    if remainder not in ("drop", "pad"):
        first = np.bincount(whole.items, minlength=whole.images)
        assert (seen + left).tolist() == first.tolist()


def test_positions_travel_as_json_and_name_what_changed() -> None:
    ids = np.arange(50) % 4
    planner = EpochPlanner(ids, 2, world_size=2, bucket_sizes=SIZES[:4], step_shapes="one")
    state = json.loads(json.dumps(EpochPosition(7, 3).at_step(5, 4).state_dict(planner.fingerprint)))
    assert (state["epoch"], state["step"]) == (3, 5)
    alone = EpochPlanner(ids, 4, bucket_sizes=SIZES[:4], step_shapes="one")
    position = EpochPosition.from_state_dict(state, alone.fingerprint)
    assert position == EpochPosition(7, 3, (TrainedPart(4, 5),))
    assert position.at_step(9, 4) == EpochPosition(7, 3, (TrainedPart(4, 9),))
    assert position.at_step(9, 8) == EpochPosition(7, 3, (TrainedPart(4, 5), TrainedPart(8, 4)))

    def refused(*args: object, **options: object) -> str:
        with pytest.raises(ResumeError) as error:
            EpochPosition.from_state_dict(state, EpochPlanner(*args, step_shapes="one", **options).fingerprint)
        return str(error.value)

    assert "50 images, now 51; bucket 1 had 13 images, now 14" in refused(
        np.append(ids, 1), 2, world_size=2, bucket_sizes=SIZES[:4]
    )
    assert "other buckets or in another order" in refused(ids[::-1], 2, world_size=2, bucket_sizes=SIZES[:4])
    assert "remainder was keep, now pad" in refused(ids, 2, remainder="pad", bucket_sizes=SIZES[:4])
    assert "bucket_sizes" in refused(ids, 2, bucket_sizes=SIZES[1:5])
    with pytest.raises(ResumeError, match="not a saved position: version"):
        EpochPosition.from_state_dict({"epoch": 1}, planner.fingerprint)
    with pytest.raises(ResumeError, match="version 9"):
        EpochPosition.from_state_dict({**state, "version": 9}, planner.fingerprint)
    for key, values in {
        "version": [True, 1.0, "1"],
        "seed": [1e300, 3.0, float("nan"), True, "3", None, 10**400, []],
        "epoch": [-1, 1e300, float("inf"), float("nan"), True, "3", None, 10**30, [3]],
        "done": [[[4, -1]], [[4, True]], [[0, 1]], [[True, 1]], [["4", 1]], [[4, 1e300]], [[10**30, 1]], ["ab"],
                 [[[4]]], 5, None, [[[1, "a"], 1]], [[float("nan"), 1]], {"a": 1}, {}, ""],
        "step": [None, -1, float("nan"), "x", {}, True, 4, 5.0],
        "fingerprint": [None, 5, "abc", ["abc"], {**planner.fingerprint, "images_per_bucket": 5}],
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises(ResumeError, match=r"^the saved position (is damaged|has version)"):
                EpochPosition.from_state_dict({**state, key: value}, planner.fingerprint)
    assert EpochPosition.from_state_dict({**state, "seed": -(2**70)}, planner.fingerprint).seed == -(2**70)
    with pytest.raises(ResumeError, match="step 4 of epoch 3 lies before step 5"):
        position.at_step(4, 8)
    with pytest.raises(PlanError, match="only 14"):
        planner.plan(done=[(4, 99)])
