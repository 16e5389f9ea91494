"""The options of a plan: named, described, checked and put into saved states here, and nowhere else."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray, as_sizes
from kohya_bucket.checks import array_of, as_flag, integer, known_keyword, one_of, whole
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.batch_sizes import Budget
from kohya_bucket.planning.costs import as_tokens, cost_of, pixels_of
from kohya_bucket.planning.orders import ORDERS, Order
from kohya_bucket.planning.remainders import REMAINDERS, RemainderContext, RemainderPolicy, policies_of
from kohya_bucket.planning.resolutions import RESOLUTION_MODES, ResolutionMode

COST = "cost"
"""Of `same_shape`."""

RepeatsLike = npt.ArrayLike | Fraction | Sequence[Fraction]
_OF_SHARDS = ("shards", "open_shards", "nodes")


def _token_cost(name: str, value: Any) -> tuple[float, float]:
    try:
        a, b = (float(v) for v in value)
    except (TypeError, ValueError, OverflowError):
        a = b = -1.0
    if not (0 <= a < math.inf and 0 <= b < math.inf and a + b > 0):
        raise PlanError(f"{name} is {value!r}, but must be two numbers a, b, 0 or more and not both 0")
    return a, b


def _positive(name: str, value: Any) -> float:
    try:
        number = -1.0 if isinstance(value, (str, bytes, bool)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = -1.0
    if not 0 < number < math.inf:
        raise PlanError(f"{name} is {value!r}, but must be a number above 0")
    return number


def _same_shape(name: str, value: Any) -> bool | str:
    if value is True or value == COST:
        return True if value is True else COST
    raise PlanError(
        f"{name} is {value!r}, but must be True or {COST!r}: for batches of its own on each rank, plan with "
        "world_size=1 and deal the steps out"
    )


def _share(name: str, value: Any) -> float:
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share <= 1:
        raise PlanError(f"{name} is {value!r}, but is a share of the image: from 0 to 1, e.g. 0.25 for a quarter")
    return share


def _option(default: Any, check: Callable[[str, Any], Any]) -> Any:
    """A field whose value is what `check(name, value)` returns; None is kept where it is the default."""
    return field(default=default, metadata={"check": check})


def _whole(low: int, bits: int = 63) -> Callable[[str, Any], int]:
    return partial(whole, low=low, bits=bits)


def _one_of(known: Mapping[str, Any]) -> Callable[[str, Any], str]:
    return lambda name, value: one_of(name, value, known)


@dataclass(frozen=True, eq=False)
class PlanOptions:
    """What `plan_epoch`, `EpochPlanner` and `BucketBatchSampler` take as keyword arguments.

    Attributes:
        remainder: what becomes of the images that do not fill a global batch: "keep" trains them in a short batch;
            `REMAINDERS` has the others, each with a text.
        small_buckets: with a remainder that is left out, what becomes of buckets that fill no global batch at all and
            would never be trained: "keep" (the default), or any other of `REMAINDERS`.
        order: "shuffled" mixes the batches and spreads each bucket evenly; `ORDERS` has the others.
        repeats: how often an image is trained in an epoch: a number or [N], whole or fractions such as 2.5 or 0.1.
        accumulate: steps for one update; the plan's steps do not depend on it.
        max_pixels: bound of images x width x height per rank and step, in place of or besides `batch_size`.
        max_tokens: the same in tokens of the model; needs `bucket_tokens`.
        max_cost: the same in cost, see `token_cost`; needs `bucket_tokens`.
        bucket_sizes: [K, 2] (width, height); needed by `max_pixels`, "merge", and "catch_all" without base.
        bucket_tokens: [K] tokens that the model makes of one image (or clip) of each bucket.
        token_cost: (a, b): an image of L tokens costs a * L + b * L**2. Its unit is that of `max_cost`: seconds, say.
        regularization: [N] bool, images that are used in rotation instead of `repeats` times.
        regularization_uses: trainings of regularization images per epoch; by default as many as of all others.
        resolutions: how [N, R] ids are used, e.g. "all": each image at each resolution; see `RESOLUTION_MODES`.
        resolution_weights: [R], for "weighted".
        run_length: steps of one run, for order="runs".
        shards: [N] number of the shard (file) that each image lies in, for order="local".
        open_shards: for order="local", shards of one bucket each that are being read at any step: so many at most, or
            so many times `nodes` by all nodes together, of which one may read more than its part.
        nodes: machines whose ranks divide the shards, with order="local". More or fewer train the same plan.
        max_crop: share of an image's area that "merge" may crop off by moving it.
        base_bucket: bucket of the catch-all batches; by default the squarest, then the largest.
        bucket_groups: [K], images are never moved from one group to another (e.g. two data sets).
        no_upscale: "merge" and "catch_all" must not move an image to a bucket that is larger in a side, for all or
            [K] by its own bucket; pixels lost by scaling down then count towards `max_crop` too.
        equal_epochs: every epoch has as many steps as the longest. With "rotate" and "weighted", epochs have the same
            number of images, but their buckets leave other remainders; shorter epochs split batches in two.
        same_shape: "cost": where a bucket has too few batches for all ranks, batches of nearly equal cost meet in a
            step: of `bucket_tokens` by `token_cost`, else of the pixels of `bucket_sizes`, else all images cost the
            same. A remainder is what does not fill a batch of one rank. True: all ranks train one bucket in a step,
            and a remainder is what does not fill all of them. By default "cost", with order="local" True.

    Raises:
        PlanError: a value outside of its range, or an option without what it needs.
    """

    remainder: str = _option("keep", _one_of(REMAINDERS))
    small_buckets: str | None = _option(None, _one_of(REMAINDERS))
    order: str = _option("shuffled", _one_of(ORDERS))
    repeats: RepeatsLike | None = None
    accumulate: int = _option(1, _whole(1, bits=31))
    max_pixels: int | None = _option(None, _whole(1))
    max_tokens: int | None = _option(None, _whole(1))
    max_cost: float | None = _option(None, _positive)
    bucket_sizes: npt.ArrayLike | None = _option(None, lambda _, sizes: as_sizes(sizes))  # noqa: RUF009
    bucket_tokens: npt.ArrayLike | None = _option(None, lambda _, tokens: as_tokens(tokens))  # noqa: RUF009
    token_cost: tuple[float, float] = _option((1.0, 0.0), _token_cost)
    regularization: npt.ArrayLike | None = None
    regularization_uses: int | None = _option(None, _whole(0))
    resolutions: str | None = _option(None, _one_of(RESOLUTION_MODES))
    resolution_weights: npt.ArrayLike | None = None
    run_length: int = _option(8, _whole(1, bits=31))
    shards: npt.ArrayLike | None = None
    open_shards: int = _option(64, _whole(2, bits=31))
    nodes: int = _option(1, _whole(1, bits=16))
    max_crop: float = _option(0.25, _share)
    base_bucket: int | None = _option(None, integer)
    bucket_groups: npt.ArrayLike | None = None
    no_upscale: npt.ArrayLike = False
    equal_epochs: bool = _option(False, partial(as_flag, error=PlanError))
    same_shape: bool | str | None = _option(None, _same_shape)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if "check" in one.metadata and not (value is None and one.default is None):
                object.__setattr__(self, one.name, one.metadata["check"](one.name, value))
        if self.same_shape is None:
            object.__setattr__(self, "same_shape", True if self.arrangement.uses_shards else COST)
        if self.small_buckets is not None and not self.policy.leaves_out:
            raise PlanError(
                f"small_buckets is {self.small_buckets!r}, but remainder={self.remainder!r} trains the images of all "
                "buckets: leave small_buckets out, or take remainder='drop'"
            )
        for option, policy in zip(("remainder", "small_buckets"), self.policies, strict=False):
            if policy.needs_sizes and self.sizes is None:
                raise PlanError(f"{option}={policy.name!r} needs bucket_sizes: {policy.needs_sizes}")
        if self.arrangement.uses_shards and self.shards is None:
            raise PlanError(
                f"order={self.order!r} needs shards: the number of the shard that each image lies in; data sets of "
                "latents and of tar shards know it themselves"
            )
        if self.resolution_weights is not None and not (self.mode and self.mode.by_weight):
            raise PlanError(
                f"resolution_weights is set, but resolutions is {self.resolutions!r}: weights belong to 'weighted'"
            )
        if self.regularization is None and self.regularization_uses is not None:
            raise PlanError("regularization_uses is set without regularization: say which images they are")
        if self.by_cost and self.arrangement.uses_shards:
            raise PlanError(
                f"same_shape is 'cost' and order is {self.order!r}, whose steps have one bucket: leave out one of them"
            )

    @property
    def policy(self) -> RemainderPolicy:
        """What `remainder` names."""
        return REMAINDERS[self.remainder]

    @property
    def policies(self) -> tuple[RemainderPolicy, ...]:
        """The policy; and where small buckets have another one, that one too."""
        return policies_of(self.remainder, self.small_buckets)

    @property
    def leaves_out_small_buckets(self) -> bool:
        """Buckets that fill no global batch are never trained."""
        return self.policies[-1].leaves_out

    @property
    def arrangement(self) -> Order:
        """What `order` names."""
        return ORDERS[self.order]

    @property
    def mode(self) -> ResolutionMode | None:
        """What `resolutions` names."""
        return None if self.resolutions is None else RESOLUTION_MODES[self.resolutions]

    @property
    def sizes(self) -> IntArray | None:
        """`bucket_sizes` as the array that they were made."""
        return cast("IntArray | None", self.bucket_sizes)

    @property
    def by_cost(self) -> bool:
        """Batches of several buckets may meet in a step."""
        return self.same_shape == COST

    @property
    def tokens(self) -> npt.NDArray[np.int64] | None:
        """`bucket_tokens` as the array that they were made."""
        return cast("npt.NDArray[np.int64] | None", self.bucket_tokens)

    @property
    def item_costs(self) -> npt.NDArray[np.float64] | None:
        """[K] cost of one image of each bucket: of its tokens, else its pixels; None where neither is known."""
        if self.tokens is not None:
            return cost_of(self.tokens, self.token_cost)
        return None if self.sizes is None else pixels_of(self.sizes).astype(np.float64)

    def budgets(self) -> list[Budget]:
        """The bounds of a batch that are set.

        Raises:
            PlanError: one that needs to know more of the buckets.
        """
        sizes, tokens, found = self.sizes, self.tokens, []
        for name, of, each, unit in (
            ("max_pixels", "sizes", None if sizes is None else pixels_of(sizes), "pixels"),
            ("max_tokens", "tokens", tokens, "tokens"),
            ("max_cost", "tokens", None if tokens is None else cost_of(tokens, self.token_cost), "of cost"),
        ):
            limit = getattr(self, name)
            if limit is not None and each is None:
                raise PlanError(f"{name} is set without bucket_{of}: the budget needs to know the buckets' {of}")
            if limit is not None and each is not None:
                found.append(Budget(name, limit, each, unit))
        return found

    def context(self, global_batch: npt.NDArray[np.int64]) -> RemainderContext:
        """What the policy may look at, for [K] buckets, at the first epoch of seed 0.

        Raises:
            PlanError: an option that goes by the bucket, for other buckets.
        """
        n = len(global_batch)
        if self.base_bucket is not None and not 0 <= self.base_bucket < n:
            raise PlanError(f"base_bucket is {self.base_bucket}, but there are buckets 0 to {n - 1}")
        groups = np.zeros(n, dtype=np.int64)
        if self.bucket_groups is not None:
            groups = array_of("bucket_groups", self.bucket_groups, dtype=np.int64)
            if groups.shape != (n,):
                raise PlanError(f"bucket_groups has shape {list(groups.shape)}, but there are {n} buckets")
        given = array_of("no_upscale", self.no_upscale)
        if given.dtype != np.bool_ or given.shape not in ((), (n,)):
            raise PlanError(
                f"no_upscale is {self.no_upscale!r}, but must be true or false, for all or each of {n} buckets"
            )
        if self.sizes is None and given.any():
            raise PlanError("no_upscale is set without bucket_sizes: which bucket is larger depends on them")
        no_upscale = np.broadcast_to(given, (n,)).copy()
        return RemainderContext(global_batch, 0, 0, self.sizes, groups, self.max_crop, self.base_bucket, no_upscale)

    def stored(self, context: RemainderContext) -> dict[str, object]:
        """What decides a plan, under the names that saved states know it by: these never change."""
        return {
            "remainder": self.remainder,
            "order": self.order,
            "repeats": self.repeats,
            "regularization": self.regularization,
            "regularization_uses": self.regularization_uses,
            "resolutions": self.resolutions,
            "resolution_weights": self.resolution_weights,
            "bucket_sizes": self.sizes,
            "bucket_groups": self.bucket_groups,
            "run_length": self.run_length if self.arrangement.uses_run_length else None,
            "crop_limit": self.max_crop if any(p.uses_max_crop for p in self.policies) else None,
            "base_bucket": self.base_bucket,
            "enlarge": ~context.no_upscale if context.no_upscale.any() else None,
            "equal_epochs": True if self.equal_epochs else None,
            # Before there was a choice, they were left out.
            "small_buckets": self.policies[1].name if len(self.policies) > 1 else None,
            "same_shape": COST if self.by_cost else None,
            "item_costs": self.item_costs if self.by_cost else None,
            **({name: getattr(self, name) for name in _OF_SHARDS} if self.arrangement.uses_shards else {}),
        }


def known_options(where: Callable[..., object], given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a caller of `where` gave as options.

    Raises:
        TypeError: an unknown name, with the nearest argument of `where`.
    """
    names = [one.name for one in fields(PlanOptions)]
    own = [p.name for p in inspect.signature(where).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if not given.keys() <= set(names):
        known_keyword(where.__name__, given, [*own, *names])
    return given
