"""Buckets that are divided by the length of captions."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import PlanError
from kohya_bucket.planning import caption_bands, plan_epoch

images = st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 30)), max_size=200)


@given(images, st.integers(1, 9))
def test_bands_divide_buckets_in_order(rows, bands):
    ids, tokens = np.array([row[0] for row in rows], int), np.array([row[1] for row in rows], int)
    found = caption_bands(ids, tokens, bands)
    assert ((found.bucket_ids >= 0) == (ids >= 0)).all()
    placed = ids >= 0
    assert (found.bucket[found.bucket_ids[placed]] == ids[placed]).all()
    assert sorted(set(found.bucket_ids[placed].tolist())) == list(range(len(found.bucket)))
    for k in set(ids[placed].tolist()):
        mine = np.flatnonzero(found.bucket == k)
        assert 1 <= len(mine) <= bands
        ends = [(tokens[found.bucket_ids == band].min(), tokens[found.bucket_ids == band].max()) for band in mine]
        assert all(a[1] < b[0] for a, b in pairwise(ends))  # one length is in one band
        assert np.allclose(found.tokens[mine], [tokens[found.bucket_ids == band].mean() for band in mine], atol=0.5)


def test_a_plan_with_bands_waits_less():
    rng = np.random.RandomState(0)
    ids, captions = np.zeros(20_000, int), rng.randint(0, 393, 20_000)
    true, idle = 256 + captions, []
    for bands in (1, 8):
        found = caption_bands(ids, captions, bands)
        plan = plan_epoch(
            found.bucket_ids, None, world_size=16, max_tokens=14_000, bucket_tokens=found.bucket_tokens([256])
        )
        costs = np.array([[true[plan.indices(s, r)].sum() for r in range(16)] for s in range(plan.steps)])
        idle.append(1 - costs.sum() / (costs.max(axis=1).sum() * 16))
    assert idle[1] < idle[0] / 3


@pytest.mark.parametrize(("given", "said"), [
    (([0, 1], [5]), "one number for each image"), (([0], [-5]), "0 or more"), (([0], [5], 0), "bands"),
    (([0], [0.5]), "whole numbers"),
])  # fmt: skip
def test_what_is_wrong_is_said(given, said):
    with pytest.raises(PlanError, match=said):
        caption_bands(*given)
