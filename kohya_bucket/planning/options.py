"""The options of a plan: named, described, checked and put into saved states here, and nowhere else."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray, as_sizes
from kohya_bucket.checks import array_of, flag, known_keyword, whole_number
from kohya_bucket.errors import PlanError
from kohya_bucket.options import choice, option, read_value, share, weights, without_effect
from kohya_bucket.planning.batch_sizes import Budget, as_tokens, cost_of, pixels_of
from kohya_bucket.planning.orders import ORDERS, Order
from kohya_bucket.planning.remainders import REMAINDERS, RemainderContext, RemainderPolicy, policies_of
from kohya_bucket.planning.resolutions import RESOLUTION_MODES, ResolutionMode

STEP_SHAPES = {
    "equal_cost": "where a bucket has too few batches for all ranks, batches of nearly equal cost meet in a step",
    "one": "all ranks train one bucket in every step, and repeat images where it has too few",
}
"""Which shapes may meet in a step."""

RepeatsLike = npt.ArrayLike | Fraction | Sequence[Fraction]
_OF_SHARDS = ("shards", "open_shards", "nodes")


def _token_cost(value: Any) -> str:
    try:
        a, b = (0.0 + v for v in value)  # a text of two digits is no pair of numbers
    except (TypeError, ValueError, OverflowError):
        a = b = -1.0
    return "" if 0 <= a < math.inf and 0 <= b < math.inf and a + b > 0 else "two numbers a, b, 0 or more and not both 0"


def _stages(value: Any) -> str:
    good = isinstance(value, (list, tuple)) and len(value) > 0 and not any(map(whole_number(1, 31), value))
    return "" if good else "a list of whole numbers of epochs, 1 or more"


def _anything(value: Any) -> str:  # noqa: ARG001
    return ""


def _two_floats(value: Any) -> tuple[float, float]:
    a, b = map(float, value)
    return a, b


@dataclass(frozen=True, kw_only=True)
class EpochOptions:
    """What a user may choose for epochs, in a trainer as in the library. The defaults train what was asked for.

    Attributes:
        remainder: what becomes of the images that do not fill a batch on all ranks: `keep` trains them in a short
            batch; `REMAINDERS` has the others, each with a text.
        small_buckets: with a remainder that is left out, what becomes of buckets that fill no batch at all and would
            never be trained: `keep` (the default), or any other of `REMAINDERS`.
        merge_max_crop: with `merge`, the largest share of an image's area that the move may crop off; where images must
            not be enlarged, pixels lost by scaling down count too.
        order: `shuffled` mixes the batches and spreads each bucket evenly; `ORDERS` has the others.
        run_length: steps of one shape in a row, with order `runs`.
        largest_first: True: every epoch begins with one batch of each shape, the one that costs a rank most first, so
            that what does not fit into memory and what is compiled shows in the first minute. By default trainers and
            loaders begin the first epoch, and only that, with the one batch that costs a rank most; False: none does.
        open_shards: with order `local`, shards of one bucket each that are being read at any step: so many at most, or
            so many times `nodes` by all nodes together, of which one may read more than its part.
        resolution_mode: how several resolutions of an image are used; see `RESOLUTION_MODES`.
        resolution_weights: one number per resolution, for `weighted`: [3, 1] is three epochs out of four.
        resolution_epochs: for `schedule`, for how many epochs each resolution but the last is trained: [4, 2] trains
            four epochs at the first, two at the second, and all others at the third.
        step_shapes: `equal_cost`: where a bucket has too few batches for all ranks, batches of nearly equal cost meet
            in a step; a remainder is what does not fill a batch of one rank. `one`: all ranks train one bucket in a
            step, and a remainder is what does not fill all of them. By default `equal_cost`, with order `local` `one`.
            The cost is that of tokens, where they are known, else of pixels, else that of one image.
        max_pixels: bound of images x width x height for one rank and step, in place of or besides a batch size.
        max_tokens: the same in tokens that the model makes of an image or a clip.
    """

    remainder: str = choice("keep", lambda: REMAINDERS)
    small_buckets: str | None = choice(
        None, lambda: REMAINDERS, needs=(lambda o: o.policies[0].leaves_out, "remainder = 'drop'")
    )
    merge_max_crop: float = option(
        0.25, share, needs=(lambda o: any(p.uses_max_crop for p in o.policies), "remainder = 'merge'")
    )
    order: str = choice("shuffled", lambda: ORDERS)
    run_length: int = option(
        8, whole_number(1, 31), int, needs=(lambda o: o.arrangement.uses_run_length, "order = 'runs'")
    )
    largest_first: bool | None = option(
        None, flag, bool,
        needs=(lambda o: not (o.largest_first and o.arrangement.uses_shards), "an order that takes any batch first"),
    )  # fmt: skip
    open_shards: int = option(
        64, whole_number(2, 31), int, needs=(lambda o: o.arrangement.uses_shards, "order = 'local'")
    )
    resolution_weights: tuple[float, ...] | None = option(
        None, weights, tuple, needs=(lambda o: o.mode is not None and o.mode.by_weight, "resolution_mode = 'weighted'")
    )
    resolution_epochs: tuple[int, ...] | None = option(
        None, _stages, tuple, needs=(lambda o: bool(o.mode and o.mode.by_schedule), "resolution_mode = 'schedule'")
    )
    max_pixels: int | None = option(None, whole_number(1), int)
    max_tokens: int | None = option(None, whole_number(1), int)
    resolution_mode: str | None = choice(None, lambda: RESOLUTION_MODES)
    step_shapes: str | None = choice(None, lambda: STEP_SHAPES)

    @property
    def policies(self) -> tuple[RemainderPolicy, ...]:
        """What `remainder` names; and where small buckets have another policy, that one too."""
        return policies_of(self.remainder, self.small_buckets)

    @property
    def arrangement(self) -> Order:
        """What `order` names."""
        return ORDERS[self.order]

    @property
    def one_shape(self) -> bool:
        """All ranks train one bucket in every step."""
        chosen = self.step_shapes or ("one" if self.arrangement.uses_shards else "equal_cost")
        return chosen == "one"

    @property
    def mode(self) -> ResolutionMode | None:
        """What `resolution_mode` names."""
        return None if self.resolution_mode is None else RESOLUTION_MODES[self.resolution_mode]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanOptions(EpochOptions):
    """What `plan_epoch`, `EpochPlanner` and `BucketBatchSampler` take as keyword arguments.

    Besides these they take those of `EpochOptions`. An option that would change nothing is refused; what describes the
    data (`bucket_sizes`, `bucket_tokens`, `bucket_groups`, `no_upscale`, `shards`) may always be given.

    Attributes:
        repeats: how often an image is trained in an epoch: a number or [N], whole or fractions such as 2.5 or 0.1.
        accumulate: steps for one update; the plan's steps do not depend on it.
        bucket_sizes: [K, 2] (width, height); needed by `max_pixels`, "merge", and "catch_all" without base.
        bucket_tokens: [K] tokens that the model makes of one image (or clip) of each bucket; needed by `max_tokens`.
        token_cost: (a, b): an image of L tokens costs a * L + b * L**2, in any unit.
        regularization: [N] bool, images that are used in rotation instead of `repeats` times.
        regularization_uses: trainings of regularization images per epoch; by default as many as of all others.
        stages: [N] number of the stage of a `schedule` in which an image is trained, and in no other, with
            `bucket_ids` of shape [N]: datasets one after another, say.
        shards: [N] number of the shard (file) that each image lies in, for order="local".
        nodes: machines whose ranks divide the shards, with order="local". More or fewer train the same plan.
        base_bucket: bucket of the catch-all batches; by default the squarest, then the largest.
        bucket_groups: [K], images are never moved from one group to another (e.g. two datasets).
        no_upscale: "merge" and "catch_all" must not move an image to a bucket that is larger in a side, for all or
            [K] by its own bucket; pixels lost by scaling down then count towards `merge_max_crop` too.
        equal_epochs: every epoch has as many steps as the longest. With "rotate" and "weighted", epochs have the same
            number of images, but their buckets leave other remainders; shorter epochs split batches in two.

    Raises:
        PlanError: a value outside of its range, or an option without what it needs.
    """

    repeats: RepeatsLike | None = None
    accumulate: int = option(1, whole_number(1, 31), int)
    bucket_sizes: npt.ArrayLike | None = option(None, _anything, as_sizes)  # noqa: RUF009
    bucket_tokens: npt.ArrayLike | None = option(None, _anything, as_tokens)  # noqa: RUF009
    token_cost: tuple[float, float] = option(
        (1.0, 0.0), _token_cost, _two_floats, needs=(lambda o: o.bucket_tokens is not None, "bucket_tokens")
    )
    regularization: npt.ArrayLike | None = None
    regularization_uses: int | None = option(
        None, whole_number(0), int, needs=(lambda o: o.regularization is not None, "regularization")
    )
    stages: npt.ArrayLike | None = None
    shards: npt.ArrayLike | None = None
    nodes: int = option(1, whole_number(1, 16), int, needs=(lambda o: o.arrangement.uses_shards, "order = 'local'"))
    base_bucket: int | None = option(
        None, whole_number(0), int,
        needs=(lambda o: any(p.uses_base_bucket for p in o.policies), "remainder = 'catch_all'"),
    )  # fmt: skip
    bucket_groups: npt.ArrayLike | None = None
    no_upscale: npt.ArrayLike = False
    equal_epochs: bool = option(False, flag, bool)

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.metadata and not (value is None and one.default is None):
                value = read_value(one.metadata, one.name, value, PlanError)
                object.__setattr__(self, one.name, value)
        for text in without_effect(self):
            raise PlanError(text)
        for name, policy in zip(("remainder", "small_buckets"), self.policies, strict=False):
            if policy.needs_sizes and self.sizes is None:
                raise PlanError(f"{name}={policy.name!r} needs bucket_sizes: {policy.needs_sizes}")
        if self.arrangement.uses_shards and self.shards is None:
            raise PlanError(
                f"order={self.order!r} needs shards: the number of the shard that each image lies in; datasets of "
                "latents and of tar shards know it themselves"
            )
        if self.by_cost and self.arrangement.uses_shards:
            raise PlanError(
                f"step_shapes is {self.step_shapes!r} and order is {self.order!r}, whose steps have one bucket: leave "
                "out one of them"
            )

    @property
    def policy(self) -> RemainderPolicy:
        """What `remainder` names."""
        return REMAINDERS[self.remainder]

    @property
    def leaves_out_small_buckets(self) -> bool:
        """Buckets that fill no global batch are never trained."""
        return self.policies[-1].leaves_out

    @property
    def sizes(self) -> IntArray | None:
        """`bucket_sizes` as the array that they were made."""
        return cast("IntArray | None", self.bucket_sizes)

    @property
    def by_cost(self) -> bool:
        """Batches of several buckets may meet in a step."""
        return not self.one_shape

    @property
    def by_rank(self) -> bool:
        """The steps or their order depend on the number of ranks, also where the global batch is the same."""
        return self.by_cost or bool(self.largest_first)

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
        sizes, tokens, budgets = self.sizes, self.tokens, []
        for name, of, per_image, unit in (
            ("max_pixels", "sizes", None if sizes is None else pixels_of(sizes), "pixels"),
            ("max_tokens", "tokens", tokens, "tokens"),
        ):
            limit = getattr(self, name)
            if limit is not None and per_image is None:
                raise PlanError(f"{name} is set without bucket_{of}: the budget needs to know the buckets' {of}")
            if limit is not None and per_image is not None:
                budgets.append(Budget(name, limit, per_image, unit))
        return budgets

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
        no_upscale_of = array_of("no_upscale", self.no_upscale)
        if no_upscale_of.dtype != np.bool_ or no_upscale_of.shape not in ((), (n,)):
            raise PlanError(
                f"no_upscale is {self.no_upscale!r}, but must be true or false, for all or each of {n} buckets"
            )
        if self.sizes is None and no_upscale_of.any():
            raise PlanError("no_upscale is set without bucket_sizes: which bucket is larger depends on them")
        no_upscale = np.broadcast_to(no_upscale_of, (n,)).copy()
        return RemainderContext(
            global_batch, 0, 0, self.sizes, groups, self.merge_max_crop, self.base_bucket, no_upscale
        )

    def stored(self, context: RemainderContext) -> dict[str, object]:
        """What decides a plan, by name, for fingerprints and saved states."""
        return {
            "remainder": self.remainder,
            "order": self.order,
            "repeats": self.repeats,
            "regularization": self.regularization,
            "regularization_uses": self.regularization_uses,
            "resolution_mode": self.resolution_mode,
            "resolution_weights": self.resolution_weights,
            "bucket_sizes": self.sizes,
            "bucket_groups": self.bucket_groups,
            "run_length": self.run_length if self.arrangement.uses_run_length else None,
            "merge_max_crop": self.merge_max_crop if any(p.uses_max_crop for p in self.policies) else None,
            "base_bucket": self.base_bucket,
            "no_upscale": context.no_upscale if context.no_upscale.any() else None,
            "equal_epochs": True if self.equal_epochs else None,
            "small_buckets": self.policies[1].name if len(self.policies) > 1 else None,
            "step_shapes": "one" if self.one_shape else "equal_cost",
            "item_costs": self.item_costs if self.by_cost or self.largest_first else None,
            # States that were saved before these existed stay equal: where unset, their names are absent.
            **({"largest_first": True} if self.largest_first else {}),
            **({"resolution_epochs": self.resolution_epochs} if self.resolution_epochs else {}),
            **({"stages": self.stages} if self.stages is not None else {}),
            **({name: getattr(self, name) for name in _OF_SHARDS} if self.arrangement.uses_shards else {}),
        }


def known_options(where: Callable[..., object], options: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that a caller of `where` gave as options.

    Raises:
        TypeError: an unknown name, with the nearest argument of `where`.
    """
    names = [one.name for one in fields(PlanOptions)]
    arguments = [p.name for p in inspect.signature(where).parameters.values() if p.kind is not p.VAR_KEYWORD]
    if not options.keys() <= set(names):
        known_keyword(where.__name__, options, [*arguments, *names])
    return options
