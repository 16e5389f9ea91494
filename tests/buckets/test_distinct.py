"""Distinct sizes by table and by sorting are the same."""

import numpy as np
import pytest

from kohya_bucket.buckets import distinct
from kohya_bucket.buckets.distinct import distinct_sizes


@pytest.mark.parametrize("unit", [1, 8, 64])
@pytest.mark.parametrize("n", [1, 50, 40_000])
def test_table_and_sort_agree(monkeypatch, unit, n) -> None:
    rng = np.random.default_rng(n + unit)
    sizes = (rng.integers(1, 30, (n, 2)) * unit).astype(np.int32)
    placed = rng.random(n) < 0.9
    placed[0] = True
    sizes[~placed] = rng.integers(-5, 5, (int((~placed).sum()), 2))
    by_table = distinct_sizes(sizes, placed, unit)
    monkeypatch.setattr(distinct, "_TABLE_CELLS", -(10**9))
    by_sort = distinct_sizes(sizes, placed, unit)
    assert by_table[0] == by_sort[0]
    np.testing.assert_array_equal(by_table[1], by_sort[1])
    assert [b.as_tuple() for b in by_table[0]] == sorted({tuple(s) for s in sizes[placed].tolist()})
    assert (by_table[1] == -1).tolist() == (~placed).tolist()


def test_nothing_placed_has_no_set() -> None:
    found, index = distinct_sizes(np.zeros((3, 2), dtype=np.int32), np.zeros(3, dtype=bool), 64)
    assert found is None
    assert index.tolist() == [-1, -1, -1]
