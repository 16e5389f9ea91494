"""A run that stops, and goes on with other ranks, batch sizes or options, trains each image as asked, or is refused."""

import json
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest

from kohya_bucket.checks import flag
from kohya_bucket.errors import PlanError
from kohya_bucket.options import without_effect
from kohya_bucket.planning import EpochPlan, EpochPlanner, EpochPosition, LedgerReason
from kohya_bucket.planning.options import PlanOptions

SIZES = np.array([[512, 512], [576, 448], [448, 576], [640, 384], [384, 640], [1024, 256]])
OFTEN = ("largest_first", "step_shapes", "bucket_sizes", "shards", "resolution_weights", "resolution_epochs")


class Unchecked(PlanOptions):
    def __post_init__(self) -> None:
        pass


def drawn_values(rng: np.random.RandomState, n: int, k: int) -> dict[str, Any]:
    """A value for every option."""
    values = {
        "repeats": [2, 2.5, rng.randint(0, 4, n), rng.choice([0.5, 1.0, 1 / 3], n)][rng.randint(4)],
        "merge_max_crop": float(rng.choice([0.0, 0.3, 0.9])),
        "run_length": int(rng.randint(1, 5)),
        "open_shards": int(rng.randint(2, 6)),
        "resolution_weights": (3, 1),
        "resolution_epochs": (int(rng.randint(1, 3)),),
        "max_pixels": int(rng.randint(1, 9)) * 512 * 512,
        "max_tokens": int(rng.randint(1024, 9000)),
        "accumulate": int(rng.randint(1, 4)),
        "bucket_sizes": SIZES[:k],
        "bucket_tokens": rng.randint(100, 1000, k),
        "token_cost": (1.0, float(rng.choice([0, 0.01]))),
        "regularization": rng.random_sample(n) < 0.3,
        "regularization_uses": int(rng.randint(0, 9)),
        "stages": np.arange(n) % 2,
        "shards": rng.randint(0, 6, n),
        "nodes": int(rng.randint(1, 4)),
        "base_bucket": int(rng.randint(k)),
        "bucket_groups": rng.randint(0, 2, k),
        "no_upscale": rng.random_sample(k) < 0.5,
    }
    for one in fields(PlanOptions):
        if "known" in one.metadata:
            values[one.name] = list(one.metadata["known"]())[rng.randint(len(one.metadata["known"]()))]
        elif one.metadata.get("check") is flag:
            values[one.name] = True
    values["largest_first"] = bool(rng.randint(2))
    assert values.keys() == {one.name for one in fields(PlanOptions)}
    return values


def drawn_case(rng: np.random.RandomState) -> tuple[np.ndarray, dict[str, Any]]:
    """Bucket numbers, and options of which each changes something."""
    n, k = int(rng.randint(2, 40)), int(rng.randint(1, 7))
    values = drawn_values(rng, n, k).items()
    options = {name: value for name, value in values if rng.random_sample() < (0.8 if name in OFTEN else 0.3)}
    if options.get("resolution_mode") != "schedule":
        options.pop("stages", None)
    while texts := list(without_effect(Unchecked(**options))):
        for text in texts:
            del options[text.split()[0]]
    columns = 2 if options.get("resolution_mode") and "stages" not in options else None
    ids = rng.choice(k, n if columns is None else (n, columns), p=rng.dirichlet(np.ones(k)))
    ids[rng.random_sample(ids.shape) < 0.05] = -1
    return ids, options


def weight_of_steps(plan: EpochPlan, steps: int) -> np.ndarray:
    """[N] how often each image counts in the first steps; one that fills several ranks of a step counts once."""
    counted = np.zeros(plan.images)
    for step in range(steps):
        for rank in range(plan.world_size):
            images = plan.indices(step, rank)
            weight = plan.loss_scale(step, rank) / plan.world_size / len(images) * plan.length[step]
            np.add.at(counted, images, weight)
    return counted


def changes_in(plan: EpochPlan) -> np.ndarray:
    """[N] what a ledger says of each image besides those that fill ranks: trainings more or fewer than asked."""
    ledger = plan.ledger()
    own = ledger.reason != LedgerReason.RANK_FILLED
    return np.bincount(ledger.image[own], weights=ledger.delta[own], minlength=plan.images)


def own_images(plan: EpochPlan, step: int) -> list[int]:
    return sorted(plan.step_indices(step)[: plan.length[step]].tolist())


@dataclass
class Part:
    """What was planned at once, and how many of its steps are trained.

    Attributes:
        changed: [N] trainings that it adds to what was to be trained: of the first part, all.
    """

    planner: EpochPlanner
    plan: EpochPlan
    changed: np.ndarray
    steps: int = 0

    def goes_on_with(self, planner: EpochPlanner) -> bool:
        same = np.array_equal(self.planner.global_batch, planner.global_batch)
        return same and (not planner.options.by_cost or self.planner.world_size == planner.world_size)


def follow(seed: int) -> str:
    """Train an epoch with interruptions. How it ended: refused, or gone on to its end."""
    rng = np.random.RandomState(seed)
    ids, options = drawn_case(rng)
    ranks, batch = int(rng.choice([1, 2, 3, 4])), int(rng.randint(1, 5))
    position, state = EpochPosition(seed, int(rng.randint(3))), None
    parts: list[Part] = []
    trained = np.zeros(len(ids))
    for interruptions in range(rng.randint(1, 6), -1, -1):
        try:
            planner = EpochPlanner(ids, batch, world_size=ranks, **options)
            if state is not None:
                position = EpochPosition.from_state_dict(state, planner.fingerprint)
            plan = planner.plan_at(position)
        except PlanError:
            return "refused"
        if parts and parts[-1].goes_on_with(planner):
            assert plan.steps == parts[-1].plan.steps - parts[-1].steps
            for step in range(plan.steps):
                assert own_images(plan, step) == own_images(parts[-1].plan, parts[-1].steps + step)
        else:
            parts.append(Part(planner, plan, changes_in(plan) if parts else weight_of_steps(plan, plan.steps)))
        steps = int(rng.randint(0, plan.steps + 1)) if interruptions else plan.steps
        trained += weight_of_steps(plan, steps)
        parts[-1].steps += steps
        position = planner.position(position, position.step + steps)
        state = json.loads(json.dumps(position.state_dict(planner.fingerprint)))
        if not parts[-1].steps and interruptions:
            parts.pop()
        if rng.random_sample() < 0.5 and (together := ranks * batch):
            ranks = int(rng.choice([n for n in range(1, together + 1) if together % n == 0]))
            batch = together // ranks
        else:
            ranks, batch = int(rng.choice([1, 2, 3, 4])), int(rng.randint(1, 5))
        if rng.random_sample() < 0.3 and options:  # refused, or it does not matter
            name = list(options)[rng.randint(len(options))]
            options[name] = drawn_values(rng, len(ids), planner.n_buckets)[name]
    assert np.allclose(trained, sum(part.changed for part in parts)), options
    return "went on"


def run(first: int, count: int) -> None:
    outcomes = [follow(seed) for seed in range(first, first + count)]
    assert outcomes.count("went on") > count // 3


def test_each_image_is_trained_as_asked_whatever_a_run_goes_on_with() -> None:
    run(0, 80)


@pytest.mark.weekly
def test_many_more_runs() -> None:
    run(1000, 6000)
