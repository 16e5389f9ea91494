"""The budget that `tokens_that_fit` finds: it fits into memory, and uses it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import PlanError
from kohya_bucket.planning import plan_epoch, tokens_that_fit


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
        ({4096: 14.0, 8192: 16.0}, float("inf"), "limit is inf"),
        ({4096: 14.0, 8192: 16.0}, 12, "limit is 12, but a step takes 12 without a single token"),
    ],
)
def test_peaks_that_tell_nothing_are_refused(peaks, limit, message):
    with pytest.raises(PlanError, match=message):
        tokens_that_fit(peaks, limit)
