"""The table look-up counts thresholds exactly as a search does."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import KohyaBuckets
from kohya_bucket.buckets.switching import ThresholdTable

positive = st.floats(1e-3, 1e3)


@given(st.lists(positive, min_size=1, max_size=40, unique=True), st.lists(st.floats(1e-9, 1e9), max_size=40))
def test_counts_equal_searchsorted_also_next_to_a_threshold(thresholds, numbers) -> None:
    thresholds = np.sort(np.array(thresholds))
    cells = ThresholdTable.build(thresholds)
    asked = np.concatenate([numbers, thresholds, np.nextafter(thresholds, 0), np.nextafter(thresholds, np.inf)])
    if cells is not None:
        np.testing.assert_array_equal(cells.steps(asked), np.searchsorted(thresholds, asked, side="right"))


def test_every_usual_set_gets_a_table() -> None:
    for resolution, high in ((512, 1024), (768, 1536), (1024, 2048)):
        for steps in (8, 16, 32, 64):
            aspects = np.unique(KohyaBuckets(resolution, 256, high, steps).bucket_set.aspects)
            assert ThresholdTable.build((aspects[1:] + aspects[:-1]) / 2) is not None


def test_thresholds_too_close_for_a_table_have_none() -> None:
    assert ThresholdTable.build(np.array([1.0, np.nextafter(1.0, 2)])) is None
    assert ThresholdTable.build(np.array([])) is None
