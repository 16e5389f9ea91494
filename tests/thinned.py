"""Parameters of which one in so many runs with every change, and the others once a week."""

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, values: Iterable[Any]) -> list[Any]:
    """`values` for `parametrize`: the first of each `every` runs with every change."""
    return [one if k % every == 0 else weekly(one) for k, one in enumerate(values)]


def weekly(*values: Any) -> Any:
    """One case of `parametrize` that runs once a week."""
    return pytest.param(*values, marks=pytest.mark.weekly)
