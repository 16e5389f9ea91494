"""Ranks compare what they are about to train, whoever carries it between them."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from kohya_bucket.planning import EpochPlanner
from kohya_bucket.planning.fingerprint import NAMES, RanksDifferError, agree, digest_of_names

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


def refused_names(*ranks: list[str] | None, deciding: str | None = None) -> list[str]:
    """What each rank is told that has these names, "" where nothing."""
    given, turn = [{}] * len(ranks), Barrier(len(ranks), timeout=60)

    def of_rank(rank: int) -> str:
        def gather(statement):
            turn.wait()
            given[rank] = statement
            turn.wait()
            return list(given)

        names = ranks[rank]
        own = {"hash": 1, "images": len(ranks[0] if names is None else names)}
        own |= {NAMES: None if names is None else digest_of_names(names)}
        try:
            agree(own, gather, "trains others", "Do it alike", deciding=deciding, names=lambda: names or ())
        except RanksDifferError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(of_rank, range(len(ranks))))


@pytest.mark.parametrize("deciding", [None, "hash"])
def test_a_number_stands_for_one_image_on_all_ranks(deciding: str | None) -> None:
    names = [f"/data/{folder}/{number:04}.png" for folder in "ab" for number in range(1500)]
    elsewhere = [name.replace("/data/", "D:/other/").replace("/", "\\") for name in names]
    for alike in ([names, names], [names, elsewhere, names], [names, None], [[], []]):
        assert refused_names(*alike, deciding=deciding) == [""] * len(alike)
    other = [*names[:2222], "/data/b/0722b.png", *names[2223:]]
    exchanged = names[1500:] + names[:1500]  # the same last parts, in the same order
    for third, told in (
        (names[::-1], "image 0 is 'a/0000.png', now 'b/1499.png'"),
        (exchanged, "image 0 is 'a/0000.png', now 'b/0000.png'"),
        (other, "image 2222 is 'b/0722.png', now 'b/0722b.png'"),
    ):
        for said in refused_names(names, names, third, deciding=deciding):
            assert said == f"rank 2 trains others than rank 0 (there, then on rank 2): {told}. Do it alike"
    for said in refused_names(names, names[:-1]):
        assert said.endswith("3000 images, now 2999; image 2999 is 'b/1499.png', now missing. Do it alike")
