"""Ranks make sure that they are about to train the same, before one waits for another for ever."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kohya_bucket.errors import PlanError
from kohya_bucket.planning.fingerprint import differences

__all__ = ["Gather", "RanksDifferError", "agree"]

Gather = Callable[[Mapping[str, Any]], list[Mapping[str, Any]]]
"""What every rank calls with its own values, and what gives each of them those of all, by rank."""


class RanksDifferError(PlanError):
    """The ranks are about to train different data, or the same in different ways."""


def agree(
    mine: Mapping[str, Any],
    gather: Gather,
    what: str,
    remedy: str,
    *,
    deciding: str | None = None,
    ignore: tuple[str, ...] = (),
) -> list[Mapping[str, Any]]:
    """The values of all ranks, which are the same ones.

    Args:
        mine: this rank's, plain ones: a fingerprint, and what belongs to it.
        gather: see `Gather`.
        what: another one of these a rank has: for the message.
        remedy: what to do, a sentence for the message.
        deciding: a key; where its values are equal, no other is looked at. Left out of the message.
        ignore: keys whose values may differ.

    Raises:
        RanksDifferError: they differ; every rank is told by the same message in what.
    """
    everyone = gather(mine)
    first = everyone[0]
    hidden = ignore if deciding is None else (*ignore, deciding)
    for rank, other in enumerate(everyone):
        if deciding is not None and other[deciding] == first[deciding]:
            continue
        found = differences(first, other, ignore=hidden)
        if found or deciding is not None:
            raise RanksDifferError(
                f"rank {rank} {what} than rank 0 (there, then on rank {rank}): "
                f"{'; '.join(found) or 'only the steps differ'}. {remedy}"
            )
    return everyone
