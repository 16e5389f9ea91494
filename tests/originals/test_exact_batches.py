"""Batches that are shuffled only when asked."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket.errors import PlanError
from kohya_bucket.originals.lopho import exact_batches

indices = st.lists(st.integers(-1, 4), max_size=50)


@given(indices, st.integers(1, 5), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 9))
def test_every_image_once_and_one_bucket_per_batch(index, size, samples, batches, drop_last, epoch) -> None:
    index = np.array(index, dtype=int)
    options = {"shuffle_samples": samples, "shuffle_batches": batches, "drop_last": drop_last, "epoch": epoch}
    made = [b.tolist() for b in exact_batches(index, size, **options)]
    assert made == [b.tolist() for b in exact_batches(index, size, **options)]
    assert all(len(set(index[b])) == 1 for b in made)
    rows = sorted(chain(*made))
    counts = np.bincount(index[index >= 0], minlength=1)
    if drop_last:
        assert all(len(b) == size for b in made)
        assert len(rows) == len(set(rows)) == (counts // size * size).sum()
    else:
        assert rows == np.flatnonzero(index >= 0).tolist()
    if not samples:
        assert all(b == sorted(b) for b in made)
    if not samples and not batches:
        assert made == sorted(made, key=lambda b: (index[b[0]], b[0]))


def test_a_batch_of_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="batch_size is 0"):
        exact_batches([0], 0)
