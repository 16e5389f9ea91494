"""Ranks compare what they are about to train, whoever carries it between them."""

import pytest

from kohya_bucket.planning import EpochPlanner
from kohya_bucket.planning.fingerprint import RanksDifferError, agree

ROOTS = [EpochPlanner([0, 1, 1], 2).fingerprint, EpochPlanner([0, 1, 1], 2, order="runs").fingerprint]


def agreed(everyone, **how):
    return [agree(mine, lambda _: everyone, "does it another way", "Do it alike", **how) for mine in everyone]


def test_equal_ranks_get_what_all_of_them_gave() -> None:
    everyone = [{**ROOTS[0], "seed": seed} for seed in (5, 6)]
    assert agreed(everyone, ignore=("seed",)) == [everyone, everyone]
    assert agreed([{**mine, "hash": 1} for mine in ROOTS], deciding="hash")  # the rest need not be equal then


def test_every_rank_is_told_the_difference() -> None:
    for mine in ROOTS:
        with pytest.raises(RanksDifferError) as error:
            agree(mine, lambda _: ROOTS, "does it another way", "Do it alike")
        assert str(error.value) == (
            "rank 1 does it another way than rank 0 (there, then on rank 1): order was shuffled, now runs; "
            "run_length was None, now 8. Do it alike"
        )
    with pytest.raises(RanksDifferError, match="only the steps differ"):
        agreed([{"hash": 1}, {"hash": 1}, {"hash": 2}], deciding="hash")
