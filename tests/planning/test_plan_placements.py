"""Images with several possible buckets: resolutions, epochs of one length, and moves that must not enlarge."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import SIZES, asked, trained

from kohya_bucket.errors import PlanError
from kohya_bucket.planning import EpochPlanner, plan_epoch
from kohya_bucket.planning.options import STEP_SHAPES


@st.composite
def several(draw: st.DrawFn) -> dict:
    """[N, R] bucket ids: column c has buckets 3c to 3c + 2, and some images lack some columns."""
    n, r = draw(st.integers(1, 120)), draw(st.integers(2, 4))
    rng = np.random.RandomState(draw(st.integers(0, 2**31)))
    ids = rng.choice(3, (n, r), p=[0.7, 0.2, 0.1]) + 3 * np.arange(r)
    ids[rng.random_sample((n, r)) < draw(st.sampled_from([0.0, 0.2]))] = -1
    ids[(ids < 0).all(axis=1), 0] = 0
    mode = draw(st.sampled_from(["rotate", "weighted", "schedule"]))
    return {
        "bucket_ids": ids,
        "batch_size": [draw(st.integers(1, 6))] * (3 * r),
        "world_size": draw(st.sampled_from([1, 2, 4])),
        "resolution_mode": mode,
        "resolution_weights": draw(st.permutations(range(1, r + 1))) if mode == "weighted" else None,
        "resolution_epochs": draw(st.permutations(range(1, r))) if mode == "schedule" else None,
        "repeats": rng.choice([1, 2], n) if draw(st.booleans()) else None,
        "step_shapes": "one",
    }


@given(case=several(), seed=st.integers(0, 2**40))
def test_epochs_of_one_length_train_what_they_train_otherwise(case: dict, seed: int) -> None:
    period = 1 + max(EpochPlanner(**case, equal_epochs=True).epochs)
    plain = [plan_epoch(**case, seed=seed, epoch=e) for e in range(period)]
    equal = [plan_epoch(**case, seed=seed, epoch=e, equal_epochs=True) for e in range(2 * period)]
    assert {p.steps for p in equal} == {max(p.steps for p in plain)}
    wanted = 1 if case["repeats"] is None else case["repeats"]
    for e, plan in enumerate(equal):
        assert (asked(plan) == wanted).all()
        assert (
            plan.items.tolist() == plan_epoch(**case, seed=seed, epoch=e).items.tolist() or case["repeats"] is not None
        )
        assert (plan.length >= 1).all()
        assert (plan.length <= plan.global_batch[plan.bucket_of_step]).all()
        assert sorted(plan.start.tolist()) == np.cumsum([0, *plan.length[np.argsort(plan.start)]])[:-1].tolist()


@given(case=several(), seeds=st.tuples(st.integers(0, 99), st.integers(100, 2**40)))
def test_how_many_images_a_bucket_trains_does_not_depend_on_the_seed(case: dict, seeds: tuple[int, int]) -> None:
    for epoch in range(3):
        one, other = (plan_epoch(**case, seed=seed, epoch=epoch, equal_epochs=True) for seed in seeds)
        assert one.steps == other.steps
        per_bucket = [np.bincount(p.bucket_of_step, weights=p.length).tolist() for p in (one, other)]
        assert per_bucket[0] == per_bucket[1]


@given(case=several(), data=st.data())
def test_epochs_of_one_length_resume_on_other_ranks(case: dict, data: st.DataObject) -> None:
    case.update(batch_size=4, world_size=2, equal_epochs=True, epoch=data.draw(st.integers(0, 9)))
    whole = plan_epoch(**case)
    stop = data.draw(st.integers(0, whole.steps))
    for world in (1, 4):
        rest = plan_epoch(**{**case, "batch_size": 8 // world, "world_size": world}, done=[(8, stop)])
        assert rest.steps == whole.steps - stop
        for s in range(rest.steps):
            assert set(rest.step_indices(s).tolist()) == set(whole.step_indices(stop + s).tolist())


def test_what_no_length_fits_is_refused() -> None:
    ids = np.tile([0, 1], (6, 1))
    with pytest.raises(PlanError, match="equal_epochs is set with fractional repeats or regularization"):
        plan_epoch(ids, 2, resolution_mode="rotate", repeats=0.5, equal_epochs=True)
    assert plan_epoch([0, 0, 1], 2, equal_epochs=True).steps == plan_epoch([0, 0, 1], 2).steps


def test_moves_do_not_enlarge() -> None:
    ids = np.array([0] * 5 + [1] * 3 + [2] * 4)
    sizes = [(448, 448), (512, 512), (576, 512)]

    def moves(**options: object) -> set:
        plan = plan_epoch(ids, 4, bucket_sizes=sizes, **options)
        assert (trained(plan) == 1).all()
        return {(row["bucket"], row["trained_in"]) for row in plan.ledger().rows()}

    assert moves(remainder="merge") == {("512x512", "448x448")}  # of equal aspect
    assert moves(remainder="merge", no_upscale=True) == {("512x512", "448x448")}
    assert moves(remainder="merge", no_upscale=True, merge_max_crop=0.2) == set()  # 23% fewer pixels
    assert moves(remainder="merge", no_upscale=[False, False, True], merge_max_crop=0.2) == {("512x512", "448x448")}
    assert moves(remainder="catch_all", base_bucket=0) == {("512x512", "448x448")}
    assert moves(remainder="catch_all", base_bucket=2) == {("448x448", "576x512"), ("512x512", "576x512")}
    assert moves(remainder="catch_all", base_bucket=2, no_upscale=True) == set()
    with pytest.raises(PlanError, match="no_upscale is set without bucket_sizes"):
        plan_epoch(ids, 4, no_upscale=True)
    with pytest.raises(PlanError, match="no_upscale is 'no'"):
        plan_epoch(ids, 4, bucket_sizes=sizes, no_upscale="no")


@pytest.mark.parametrize("remainder", ["merge", "catch_all"])
def test_what_is_left_of_an_epoch_trains_in_its_own_bucket_after_another_global_batch(remainder: str) -> None:
    rng = np.random.RandomState(3)
    ids = rng.choice(6, 97)
    case = {"bucket_ids": ids, "bucket_sizes": SIZES, "remainder": remainder, "repeats": 2}
    case |= {"merge_max_crop": 0.9} if remainder == "merge" else {}
    whole = plan_epoch(**case, batch_size=5)
    assert whole.moves
    for stop in range(whole.steps + 1):
        rest = plan_epoch(**case, batch_size=7, done=[(5, stop)])
        assert not rest.moves
        for s in range(rest.steps):
            assert set(ids[rest.step_indices(s)].tolist()) == {int(rest.bucket_of_step[s])}
        before = np.bincount(np.concatenate([[], *map(whole.step_indices, range(stop))]).astype(int), minlength=97)
        assert (before + trained(rest) == 2).all()


@given(seed=st.integers(0, 2**31), n=st.integers(1, 12), r=st.integers(1, 3), share=st.sampled_from([0.2, 0.5, 0.8]))
def test_all_resolutions_train_each_image_once_where_it_has_a_bucket(seed: int, n: int, r: int, share: float) -> None:
    """Also where there happen to be as many rows as the last image's number says."""
    rng = np.random.RandomState(seed)
    ids = rng.choice(3, (n, r)) + 3 * np.arange(r)
    ids[rng.random_sample((n, r)) < share] = -1
    plan = plan_epoch(ids, 2, resolution_mode="all", seed=seed)
    seen = [
        (image, int(plan.bucket_of_step[step]))
        for step in range(plan.steps)
        for image in plan.indices(step, 0).tolist()
    ]
    assert sorted(seen) == sorted((int(i), int(ids[i, c])) for i, c in zip(*np.nonzero(ids >= 0), strict=True))


def test_more_resolutions_than_numpy_takes_choices() -> None:
    ids = np.arange(4 * 70).reshape(4, 70)
    ids[:3, :69] = -1
    plan = plan_epoch(ids, 1, resolution_mode="weighted", resolution_weights=[1] * 70)
    of_image = {plan.indices(step, 0)[0]: int(plan.bucket_of_step[step]) for step in range(plan.steps)}
    assert [of_image[i] for i in range(3)] == ids[:3, 69].tolist()
    assert of_image[3] in ids[3]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            {"bucket_ids": [[0, 1], [0, 2]], "resolution_mode": "weighted", "resolution_weights": [3, 1]},
            r"epoch 1 trains too few images in an epoch \(0\) for the 1 steps of another epoch",
        ),
        ({"bucket_ids": [[3, 2, 5], [-1, 3, -1]], "resolution_mode": "rotate", "world_size": 7}, r"epoch 0 .* \(0\)"),
    ],
)
def test_epochs_that_leave_everything_out_are_as_long_as_no_other(case: dict, message: str) -> None:
    options = {"remainder": "drop", "small_buckets": "drop", "batch_size": 2}
    steps = {plan_epoch(**case, **options, epoch=epoch).steps for epoch in range(4)}
    assert 0 in steps
    assert len(steps) > 1
    for epoch in range(4):
        with pytest.raises(PlanError, match=message):
            plan_epoch(**case, **options, epoch=epoch, equal_epochs=True)


@given(
    ids=st.integers(1, 3).flatmap(
        lambda r: st.lists(st.lists(st.integers(-1, 4), min_size=r, max_size=r), min_size=1, max_size=14)
    ),
    batch=st.integers(1, 5), ranks=st.integers(1, 7), mode=st.sampled_from(["rotate", "weighted", "schedule"]),
    step_shapes=st.sampled_from([*STEP_SHAPES]), remainder=st.sampled_from(["keep", "pad", "drop"]),
    small=st.sampled_from(["keep", "pad", "drop"]),
)  # fmt: skip
def test_equal_epochs_are_equal_or_refused(ids, batch, ranks, mode, step_shapes, remainder, small) -> None:
    options = {"resolution_mode": mode, "step_shapes": step_shapes, "remainder": remainder}
    if remainder == "drop":
        options["small_buckets"] = small
    if mode == "weighted":
        options["resolution_weights"] = [2, 1, 1][: len(ids[0])]
    if mode == "schedule":
        if len(ids[0]) == 1:
            return
        options["resolution_epochs"] = [1] * (len(ids[0]) - 1)
    planner = EpochPlanner(ids, batch, world_size=ranks, equal_epochs=True, **options)
    try:
        plans = [planner.plan(5, epoch) for epoch in planner.epochs]
    except PlanError:
        alone = EpochPlanner(ids, batch, world_size=ranks, **options)
        plans = [alone.plan(5, epoch) for epoch in planner.epochs]
        trained = [int(plan.length.sum()) for plan in plans]
        assert min(trained) < max(plan.steps for plan in plans)  # an image for each step is not there
        return
    assert len({plan.steps for plan in plans}) == 1
    assert all(len(plan.indices(step, rank)) for plan in plans for step in range(plan.steps) for rank in range(ranks))
