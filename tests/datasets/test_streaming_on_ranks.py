"""Streams on real ranks: processes of one gloo group, which meet at a port or in a file.

Two ranks without workers are in tests/reported/test_epochs.py.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.datasets.stream_ranks import N, restarted, started


@pytest.mark.parametrize(
    ("ranks", "workers", "at_port"),
    [
        pytest.param(3, 0, True, marks=pytest.mark.slow),
        pytest.param(2, 2, True, marks=pytest.mark.weekly),
        pytest.param(3, 1, False, marks=pytest.mark.weekly),
        pytest.param(5, 0, False, marks=pytest.mark.weekly),
    ],
)
def test_ranks_share_a_stream_or_fail_before_the_first_batch(
    tmp_path: Path, ranks: int, workers: int, at_port: bool
) -> None:
    found = started(tmp_path, ranks, workers, at_port)
    for case in ("whole", "whole, in its order", "hf seeded"):
        rows = found.get(case)
        if rows is None:
            continue
        assert [row["refused"] for row in rows] == [""] * ranks
        assert len({len(row["trained"]) for row in rows}) == 1  # as many steps on each
        # of both epochs; a short batch may repeat an image of its own, so that no rank is empty
        steps = zip(*(row["trained"] for row in rows), strict=True)
        seen = Counter(image for step in steps for image in {i for batch in step for i in batch})
        assert seen == dict.fromkeys(range(N), 2)
    for row in found.get("alone", ()):  # who says that it is alone reads alone
        assert sorted(i for batch in row["trained"] for i in batch) == sorted([*range(N)] * 2)
    reasons = {
        "unseeded": "reads another stream than rank 0",
        "unseeded, in its order": "reads another stream than rank 0",
        "split": "reads another stream than rank 0",
        "seeds": "seed was 0, now 1",
        "changes later": "what the images are, in their order",
        "hf unseeded": "reads another stream than rank 0",
        "hf split": "reads another stream than rank 0",
    }
    assert {"whole", "unseeded"} <= found.keys()
    for case in reasons.keys() & found.keys():
        for row in found[case]:
            assert reasons[case] in row["refused"]
            assert case == "changes later" or row["trained"] == []
            if "another stream" in reasons[case]:
                assert "same seed" in row["refused"]


@pytest.mark.parametrize(
    ("counts", "workers"),
    [
        pytest.param((1, 2), 0, marks=pytest.mark.slow),
        pytest.param((0, 1), 0, marks=pytest.mark.slow),
        pytest.param((1, 1), 1, marks=pytest.mark.weekly),
    ],
)
def test_a_restarted_run_meets_whatever_its_nodes_count_and_its_store_holds(
    tmp_path: Path, counts: tuple[int, int], workers: int
) -> None:
    """Each node counts its own restarts, and a store may still hold what earlier processes said."""
    ranks = restarted(tmp_path, counts, workers)
    assert len({len(steps) for steps in ranks}) == 1
    assert Counter(image for step in zip(*ranks, strict=True) for image in {i for batch in step for i in batch}) == (
        dict.fromkeys(range(N), 3)
    )
