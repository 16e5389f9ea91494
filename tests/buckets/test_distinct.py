"""Distinct sizes, by a table where few can occur and by sorting where many can."""

import numpy as np
import pytest

from kohya_bucket.buckets.bucket import distinct_sizes


@pytest.mark.long
@pytest.mark.parametrize("unit", [1, 8, 64])
@pytest.mark.parametrize("n", [1, 50, 40_000])
@pytest.mark.parametrize("largest", [30, 30_000])
def test_each_row_has_its_size_in_a_sorted_set(unit, n, largest) -> None:
    rng = np.random.default_rng(n + unit)
    sizes = (rng.integers(1, largest, (n, 2)) * unit).astype(np.int32)
    placed = rng.random(n) < 0.9
    placed[0] = True
    sizes[~placed] = rng.integers(-5, 5, (int((~placed).sum()), 2))
    found, index = distinct_sizes(sizes, placed, unit)
    assert [b.as_tuple() for b in found] == sorted({tuple(s) for s in sizes[placed].tolist()})
    np.testing.assert_array_equal(np.array(found.sizes)[index[placed]], sizes[placed])
    assert (index == -1).tolist() == (~placed).tolist()


def test_nothing_placed_has_no_set() -> None:
    found, index = distinct_sizes(np.zeros((3, 2), dtype=np.int32), np.zeros(3, dtype=bool), 64)
    assert found is None
    assert index.tolist() == [-1, -1, -1]
