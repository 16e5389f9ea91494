"""`PlanOptions` as keyword arguments: for type checkers, and for whoever takes them and passes them on."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypedDict, cast

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import array_of, known_keyword
from kohya_bucket.planning.options import PlanOptions, RepeatsLike

__all__ = ["PlanKeywords", "known_options"]


class PlanKeywords(TypedDict, total=False):
    """`PlanOptions` as keyword arguments, for type checkers."""

    remainder: str
    small_buckets: str | None
    order: str
    repeats: RepeatsLike | None
    accumulate: int
    max_pixels: int | None
    max_tokens: int | None
    max_cost: float | None
    bucket_sizes: npt.ArrayLike | None
    bucket_tokens: npt.ArrayLike | None
    token_cost: tuple[float, float]
    regularization: npt.ArrayLike | None
    regularization_uses: int | None
    resolutions: str | None
    resolution_weights: npt.ArrayLike | None
    run_length: int
    shards: npt.ArrayLike | None
    open_shards: int
    nodes: int
    max_crop: float
    base_bucket: int | None
    bucket_groups: npt.ArrayLike | None
    no_upscale: npt.ArrayLike
    equal_epochs: bool
    same_shape: bool | str


_NAMES = tuple(field.name for field in fields(PlanOptions))


def known_options(where: Callable[..., object], given: Mapping[str, Any]) -> PlanKeywords:
    """The keyword arguments that a caller of `where` gave as options; old names under the new ones, with a warning.

    Raises:
        TypeError: an unknown name, with the nearest argument of `where`; or an old name beside the new one.
    """
    options = dict(given)
    for old, (new, turned) in _OLD_NAMES.items():
        if old in options:
            if new in options:
                raise TypeError(f"{where.__name__} got {new} and {old}, its old name: leave {old} out")
            warnings.warn(
                f"{old} of {where.__name__} is now {new}; the old name goes with the next version",
                DeprecationWarning,
                stacklevel=3,
            )
            options[new] = turned(options.pop(old))
    if not options.keys() <= set(_NAMES):
        own = [p.name for p in inspect.signature(where).parameters.values() if p.kind is not p.VAR_KEYWORD]
        known_keyword(where.__name__, options, [*own, *_NAMES])
    return cast(PlanKeywords, options)


def _opposite(enlarge: Any) -> Any:
    given = array_of("enlarge", enlarge)
    return ~given if given.dtype == np.bool_ else enlarge


_OLD_NAMES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "crop_limit": ("max_crop", lambda share: share),
    "enlarge": ("no_upscale", _opposite),
}
