"""What tokens cost, from times: equal to what they were made of, and no other pair fits better."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import PlanError
from kohya_bucket.planning import fit_cost, measure_cost, plan_epoch, tokens_that_fit

tokens = st.lists(st.integers(1, 200_000), min_size=2, max_size=9, unique=True)


@given(tokens, st.floats(1e-6, 1), st.floats(1e-12, 1e-4))
def test_exact_times_give_their_cost(lengths: list[int], a: float, b: float) -> None:
    seconds = [a * n + b * n * n for n in lengths]
    fit = fit_cost(lengths, seconds)
    assert fit.residual < 1e-6
    assert fit.fitted == pytest.approx(seconds, rel=1e-6)


@given(tokens, st.data())
def test_no_other_cost_is_nearer(lengths: list[int], data: st.DataObject) -> None:
    """Whatever was measured, also where a straight line would have a negative part."""
    seconds = np.array(data.draw(st.lists(st.floats(1e-3, 1e3), min_size=len(lengths), max_size=len(lengths))))
    fit, length = fit_cost(lengths, seconds), np.array(lengths, dtype=float)
    a, b = fit.token_cost
    assert a >= 0
    assert b >= 0
    best = ((fit.fitted / seconds - 1) ** 2).sum()
    assert fit.residual == pytest.approx(np.sqrt(best / len(lengths)))
    scale = seconds.max() / length.max()
    for more_a, more_b in itertools.product((-0.1, -1e-3, 0, 1e-3, 0.1), repeat=2):
        other = (
            np.maximum(a + more_a * scale, 0) * length + np.maximum(b + more_b * scale / length.max(), 0) * length**2
        )
        assert ((other / seconds - 1) ** 2).sum() >= best * (1 - 1e-9) - 1e-12


def test_steps_are_timed_until_the_device_is_done(monkeypatch) -> None:
    """A clock that only `synchronize` moves on, as far as was handed over; the first round is slow."""
    now, handed, calls, told = [0.0], [], [], []
    monkeypatch.setattr("kohya_bucket.planning.costs.time.perf_counter", lambda: now[0])

    def step(k: int) -> None:
        calls.append(k)
        handed.append([10, 40, 20][k] * (50 if len(calls) <= 3 else 1) + (3 if len(calls) == 5 else 0))

    def synchronize() -> None:
        while handed:
            now[0] += handed.pop()

    fit = measure_cost(step, [100, 400, 200], rounds=2, synchronize=synchronize, progress=lambda *at: told.append(at))
    assert calls == [0, 1, 2] * 3
    assert told == [(i, 9) for i in range(1, 10)]
    assert fit.seconds.tolist() == [10, 40, 20]
    assert fit.token_cost == pytest.approx((0.1, 0))


@pytest.mark.parametrize(
    ("lengths", "seconds", "words"),
    [
        ([5, 5], [1, 2], r"tokens is \[5, 5\]: what they cost follows from two different numbers at least"),
        ([5, 6], [1, 0], "seconds is .* one number above 0 for each of 2 shapes"),
        ([5, 6], [1], "for each of 2 shapes"),
        ([5, -6], [1, 2], "must be .* whole numbers, 1 or more"),
    ],
)
def test_what_is_refused(lengths, seconds, words) -> None:
    with pytest.raises(PlanError, match=words):
        fit_cost(lengths, seconds)


@given(fixed=st.floats(1, 30), slope=st.floats(1e-4, 5e-3), seed=st.integers(0, 99))
def test_batches_fit_into_memory_and_use_it(fixed, slope, seed):
    """With a synthetic model of memory, of which every measurement is a hundredth off."""
    rng = np.random.default_rng(seed)
    peaks = {n: (fixed + slope * n) * rng.uniform(0.99, 1.01) for n in (4096, 16384, 32768)}
    limit = fixed + slope * 60_000
    budget = tokens_that_fit(peaks, limit)
    tokens = np.array([1024, 4096, 9216])
    plan = plan_epoch(np.repeat([0, 1, 2], 200), bucket_tokens=tokens, max_tokens=budget)
    taken = fixed + slope * plan.length * tokens[plan.bucket_of_step]
    assert taken.max() <= limit
    assert taken.max() >= 0.75 * limit


@pytest.mark.parametrize(
    ("peaks", "limit", "message"),
    [
        ({4096: 9.0}, 24, "needs two"),
        ({4096: 9.0, 8192: 8.0}, 24, "not lie on a rising line"),
        ({1: 1.0, 2: 9.0, 3: 2.0, 4: 30.0}, 24, "not lie on a rising line"),
        ({4096: 14.0, 8192: 16.0}, 12, "limit is 12, but a step takes 12 without a single token"),
    ],
)
def test_peaks_that_tell_nothing_are_refused(peaks, limit, message):
    with pytest.raises(PlanError, match=message):
        tokens_that_fit(peaks, limit)
