"""Packs: every image once, within the budget, no more packs than best-fit decreasing needs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import PlanError
from kohya_bucket.planning import PackPlan, plan_packs


@st.composite
def cases(draw: st.DrawFn) -> dict:
    budget = draw(st.integers(1, 300))
    kinds = draw(st.lists(st.integers(max(1, budget // draw(st.sampled_from([1, 3, 20]))), budget), min_size=1))
    tokens = draw(st.lists(st.sampled_from(kinds), min_size=8, max_size=150))
    return {
        "tokens": tokens,
        "budget": budget,
        "world_size": draw(st.integers(1, 8)),
        "seed": draw(st.integers(-9, 2**70)),
        "epoch": draw(st.integers(0, 99)),
    }


def packs(plan: PackPlan) -> list[list[int]]:
    steps, ranks = plan.tokens.shape
    return [plan.indices(step, rank).tolist() for step in range(steps) for rank in range(ranks)]


def best_fit_decreasing(tokens: list[int], budget: int) -> int:
    """How many packs the textbook's loop makes."""
    rooms: list[int] = []
    for size in sorted(tokens, reverse=True):
        room = min((room for room in rooms if room >= size), default=budget)
        if room in rooms:
            rooms.remove(room)
        rooms.append(room - size)
    return len(rooms)


@given(case=cases())
def test_every_image_once_within_the_budget(case: dict) -> None:
    plan, ranks, tokens = plan_packs(**case), case["world_size"], np.array(case["tokens"])
    made = packs(plan)
    times = np.bincount([image for pack in made for image in pack], minlength=len(tokens))
    assert times.min() == 1
    repeated = len(plan.items) - len(tokens)
    assert repeated < ranks
    assert not repeated or max(map(len, made)) == 1
    assert min(map(len, made)) >= 1
    loads = np.array([tokens[pack].sum() for pack in made]).reshape(-1, ranks)
    assert (loads == plan.tokens).all()
    assert loads.max() <= case["budget"]
    assert plan.slack == np.ptp(loads, axis=1).max()
    assert plan.lower_bound <= len(made) < best_fit_decreasing(case["tokens"], case["budget"]) + ranks
    assert plan.waste == pytest.approx(1 - loads.sum() / (len(made) * case["budget"]))


@given(case=cases(), data=st.data())
def test_what_is_left_goes_on_with_other_ranks(case: dict, data: st.DataObject) -> None:
    plan = plan_packs(**case)
    assert plan_packs(**case).hash == plan.hash
    step = data.draw(st.integers(0, plan.steps))
    left, ranks = plan.left(step), case["world_size"]
    trained = [image for pack in packs(plan)[: step * ranks] for image in pack]
    assert sorted({*trained, *left.tolist()}) == list(range(len(case["tokens"])))
    assert not set(trained) & set(left.tolist())
    rest = plan_packs(**{**case, "world_size": min(3, max(1, len(left)))}, images=left)
    assert sorted({image for pack in packs(rest) for image in pack}) == left.tolist()


def test_epochs_pack_other_images_together() -> None:
    plans = [plan_packs([10] * 60, 40, world_size=2, epoch=epoch) for epoch in (0, 1)]
    assert [plan.tokens.shape for plan in plans] == [(8, 2), (8, 2)]
    assert packs(plans[0]) != packs(plans[1])


def test_images_of_nearly_equal_tokens_fill_their_packs() -> None:
    """Best fit alone puts the largest three together, and leaves them a quarter empty."""
    tokens = np.random.RandomState(0).randint(95, 106, 4000)
    assert best_fit_decreasing(tokens.tolist(), 402) > 1050
    assert plan_packs(tokens, 402).waste < 0.01


@pytest.mark.parametrize("seed", range(40))
def test_ranks_have_about_as_many_tokens_in_every_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = (rng.integers(256, 4096, 300), rng.choice([1024, 2304, 4096], 300), np.exp(rng.normal(7, 0.6, 300)))
    tokens = np.clip(kinds[seed % 3].astype(int), 1, 4096)
    plan = plan_packs(tokens, 16_384, world_size=(2, 4, 8)[seed % 3], seed=seed)
    assert plan.slack <= 0.05 * 16_384


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tokens": [3, 9], "budget": 8}, "image 1 has 9 tokens, but the budget is 8"),
        ({"tokens": [3, 4], "budget": 8, "world_size": 3}, "2 images for 3 ranks"),
        ({"tokens": [3, 0], "budget": 8}, "whole numbers, 1 or more"),
        ({"tokens": [3, 4], "budget": 8, "images": [1, 1]}, "holds a number twice"),
        ({"tokens": [3, 4], "budget": 8, "images": [2]}, "numbers from 0 to 1"),
    ],
)
def test_what_is_refused(arguments: dict, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_packs(**arguments)


def test_nothing_is_no_step() -> None:
    plan = plan_packs([], 10, world_size=4)
    assert (plan.steps, plan.waste, plan.slack) == (0, 0.0, 0)
    with pytest.raises(PlanError, match="does not exist"):
        plan.indices(0, 0)
