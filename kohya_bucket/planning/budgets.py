"""Upper bounds of what one rank trains in a step, other than a number of images."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.costs import cost_of, pixels_of

__all__ = ["Budget", "budgets_of"]

_MOST = 2**31 - 1


@dataclass(frozen=True)
class Budget:
    """One bound.

    Attributes:
        name: of the option.
        limit: the bound.
        each: [K] what one image of each bucket takes of it, above 0.
        unit: what is counted, for messages.
    """

    name: str
    limit: float
    each: npt.NDArray[np.int64] | npt.NDArray[np.float64]
    unit: str

    def images(self) -> npt.NDArray[np.int64]:
        """[K] images of each bucket that fit; 0 where not even one does."""
        if self.each.dtype.kind == "i":
            return np.asarray(self.limit // np.maximum(self.each, 1), dtype=np.int64)
        # What is three times an image's cost in decimals is a hair less in binary numbers.
        fits = np.floor(self.limit / self.each * (1 + 1e-12))
        return np.minimum(fits, _MOST).astype(np.int64)


def budgets_of(
    *,
    max_pixels: int | None,
    max_tokens: int | None,
    max_cost: float | None,
    sizes: IntArray | None,
    tokens: npt.NDArray[np.int64] | None,
    token_cost: tuple[float, float],
) -> list[Budget]:
    """The bounds that are set.

    Raises:
        PlanError: one that needs to know more of the buckets.
    """
    found = []
    if max_pixels is not None:
        if sizes is None:
            raise PlanError("max_pixels is set without bucket_sizes: the budget needs to know the buckets' sizes")
        found.append(Budget("max_pixels", max_pixels, pixels_of(sizes), "pixels"))
    if (max_tokens is not None or max_cost is not None) and tokens is None:
        name = "max_cost" if max_tokens is None else "max_tokens"
        raise PlanError(f"{name} is set without bucket_tokens: the budget needs to know the buckets' tokens")
    if max_tokens is not None and tokens is not None:
        found.append(Budget("max_tokens", max_tokens, tokens, "tokens"))
    if max_cost is not None and tokens is not None:
        found.append(Budget("max_cost", max_cost, cost_of(tokens, token_cost), "of cost"))
    return found
