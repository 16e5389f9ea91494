"""Where one bucket hands over to the next."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kohya_bucket import BucketSet, KohyaBuckets
from kohya_bucket.buckets import switching_points
from kohya_bucket.buckets.choices import SWITCHING_METHODS
from kohya_bucket.buckets.switching import aspect_switch

LANDSCAPE_512 = {
    "midpoint": [1.1429, 1.4762, 1.9333, 2.3000, 2.8250, 3.3750],
    "geometric": [1.1339, 1.4639, 1.9149, 2.2978, 2.7928, 3.3727],
    "area": [1.1407, 1.4911, 1.9775, 2.2083, 2.9396, 3.2589],
}
units = st.integers(1, 32)
bucket_sets = st.lists(st.tuples(units, units), min_size=1, max_size=12, unique=True).map(
    lambda dims: BucketSet.from_dims([(w * 64, h * 64) for w, h in dims])
)


@pytest.mark.parametrize("method", SWITCHING_METHODS)
def test_the_table_at_512(method) -> None:
    points = [p for p in switching_points(KohyaBuckets(512).bucket_set, method) if not p.portrait]
    assert [round(float(p), 4) for p in points[:6]] == LANDSCAPE_512[method]
    assert f"{points[0].narrower} {points[0].wider}" == "512x512 576x448"


def test_portrait_and_landscape_differ_by_midpoint_and_mirror_by_the_others() -> None:
    for method in SWITCHING_METHODS:
        points = np.array([p.aspect for p in switching_points(KohyaBuckets(512).bucket_set, method)])
        mirrored = 1 / points[::-1]
        assert np.allclose(points, mirrored, rtol=1e-12) is (method != "midpoint")
    tall = {str(p.narrower): 1 / p.aspect for p in switching_points(KohyaBuckets(512).bucket_set)}
    assert round(tall["384x640"], 4) == 1.4516


@given(bucket_sets, st.sampled_from(list(SWITCHING_METHODS)))
def test_points_lie_between_their_buckets(bucket_set, method) -> None:
    points = switching_points(bucket_set, method)
    assert len(points) == len(set(bucket_set.aspects)) - 1
    for point in points:
        assert point.narrower.aspect_ratio < point.aspect <= point.wider.aspect_ratio
        at = aspect_switch(bucket_set, method).index(np.array([np.nextafter(point.aspect, 0), point.aspect]))
        assert [bucket_set[k] for k in at] == [point.narrower, point.wider]


@given(st.integers(256, 1024), st.floats(0.26, 3.9))
def test_area_takes_the_largest_area_less_what_is_cut(resolution, aspect) -> None:
    rule = KohyaBuckets(resolution // 64 * 64, 128, 2048)
    sizes = rule.bucket_set.sizes.astype(float)
    wider = aspect > sizes[:, 0] / sizes[:, 1]
    resized = np.where(wider, sizes[:, 1] ** 2 * aspect, sizes[:, 0] ** 2 / aspect)
    scores = 2 * sizes.prod(axis=1) - resized
    (chosen,) = aspect_switch(rule.bucket_set, "area").index(np.array([aspect]))
    # The two buckets on either side of the aspect are the only ones compared.
    order = np.argsort(sizes[:, 0] / sizes[:, 1])
    at = np.searchsorted((sizes[:, 0] / sizes[:, 1])[order], aspect)
    neighbours = order[max(0, at - 1) : at + 1]
    assert scores[chosen] >= scores[neighbours].max() - 1e-6
