"""Random datasets and settings, shared by the tests of planning."""

from dataclasses import fields

import numpy as np
from hypothesis import strategies as st

from kohya_bucket import planning
from kohya_bucket.planning import EpochPlan
from kohya_bucket.planning.options import EpochOptions, PlanOptions

_OF_A_CHOICE = ("merge_max_crop", "run_length", "open_shards", "nodes", "base_bucket")
SIZES = np.array([[512, 512], [576, 448], [448, 576], [640, 384], [384, 640], [1024, 256]], dtype=np.int32)


@st.composite
def cases(draw: st.DrawFn) -> dict:
    k = draw(st.integers(1, len(SIZES)))
    n = draw(st.integers(0, 150))
    rng = np.random.RandomState(draw(st.integers(0, 2**31)))
    weights = rng.random_sample(k) ** 3 + 1e-3
    ids = rng.choice(k, n, p=weights / weights.sum())
    if draw(st.booleans()):
        ids[rng.random_sample(n) < 0.1] = -1
    batch = draw(st.one_of(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=k, max_size=k)))
    repeats = draw(st.sampled_from([None, 1, 3, 0.4, 2.5, "per image", "fractions"]))
    if repeats == "per image":
        repeats = rng.randint(0, 5, n)
    elif repeats == "fractions":
        repeats = rng.choice([0.1, 1.0, 2.5, 1 / 3], n)
    regularization = None
    if draw(st.integers(0, 3)) == 0:
        regularization = rng.random_sample(n) < 0.4
    return {
        "bucket_ids": ids,
        "batch_size": batch,
        "world_size": draw(st.sampled_from([1, 2, 3, 4, 8, 64])),
        "seed": draw(st.integers(-5, 2**40)),
        "epoch": draw(st.integers(0, 50)),
        "repeats": repeats,
        "regularization": regularization,
        "bucket_sizes": SIZES[:k],
        "accumulate": draw(st.integers(1, 5)),
        "run_length": draw(st.integers(1, 9)),
        "shards": rng.randint(0, draw(st.integers(1, 40)), n),
        "open_shards": draw(st.integers(2, 20)),
        "nodes": draw(st.sampled_from([1, 1, 2, 3, 8])),
        "merge_max_crop": draw(st.sampled_from([0.0, 0.3, 0.6])),
        "step_shapes": "one",  # test_equal_cost.py has the default
    }


def with_effect(case: dict) -> dict:
    """A random case without those of its options that would change nothing."""
    chosen = EpochOptions(**{name: case[name] for name in ("remainder", "small_buckets", "order") if name in case})
    about = {one.name: one.metadata for one in fields(PlanOptions) if one.name in _OF_A_CHOICE}
    return {name: value for name, value in case.items() if name not in about or about[name]["needs"][0](chosen)}


def plan_epoch(*positional, **case) -> EpochPlan:
    """`planning.plan_epoch` of a random case."""
    return planning.plan_epoch(*positional, **with_effect(case))


def trained(plan: EpochPlan) -> np.ndarray:
    """[N] how often all ranks together train each image."""
    parts = [plan.indices(s, r) for s in range(plan.steps) for r in range(plan.world_size)]
    return np.bincount(np.concatenate([[], *parts]).astype(int), minlength=plan.images)


def asked(plan: EpochPlan) -> np.ndarray:
    """How often each image was to be trained: what it is, less what the ledger says was added or left out."""
    ledger = plan.ledger()
    return trained(plan) - np.bincount(ledger.image, weights=ledger.delta, minlength=plan.images).astype(int)


def assert_all_is_accounted_for(plan: EpochPlan, case: dict) -> None:
    """Trained = asked + what the ledger says, image by image; nothing without a bucket is trained."""
    ledger, wanted = plan.ledger(), asked(plan)
    assert wanted.min(initial=0) >= 0
    assert wanted.sum() == plan.asked == ledger.asked
    assert ledger.trained == trained(plan).sum() == plan.samples
    if case["repeats"] is None and case["regularization"] is None:
        assert (wanted == 1).all()
    assert (trained(plan)[case["bucket_ids"] < 0] == 0).all()
