"""Parameters of which one in so many runs with the fast tests, and the others with the slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, values: Iterable[Any]) -> list[Any]:
    """`values` for `parametrize`: the first of each `every` is fast."""
    return [one if k % every == 0 else slow(one) for k, one in enumerate(values)]


def slow(*values: Any) -> Any:
    """One case of `parametrize` that runs with the slow tests."""
    return pytest.param(*values, marks=pytest.mark.slow)
