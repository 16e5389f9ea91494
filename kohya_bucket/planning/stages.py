"""The stages in which an epoch, or what is left of one, becomes a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import whole
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.batches import BatchLayout, cut_batches, separate_repeats, split_batches
from kohya_bucket.planning.demand import Demand, sequence_items
from kohya_bucket.planning.equal_cost import EqualCost, equal_cost
from kohya_bucket.planning.ledger import Rows
from kohya_bucket.planning.options import PlanOptions
from kohya_bucket.planning.orders import with_largest_first
from kohya_bucket.planning.plan import EpochPlan, MixedSteps, rank_costs
from kohya_bucket.planning.remainders import KEEP, RemainderContext, apply_policies
from kohya_bucket.planning.stream import Purpose, stream

if TYPE_CHECKING:
    from kohya_bucket.planning.windows import Windows


@dataclass(kw_only=True)
class Draft:
    """An epoch while it is planned: what is asked, and what the stages make of it one after another.

    Attributes:
        options: as chosen.
        context: what remainders depend on besides, with the seed and the epoch of this plan.
        seed, epoch: of the plan.
        part: 0 for a whole epoch, more where what is left of it is planned again.
        ranks: W; global_batch: [K] images that fill a step of each bucket, on all ranks together.
        asked: what is to be trained; epoch_asked: what the whole epoch asks.
        shards: [N] in which each image lies, or None where that does not matter.
        least_steps: batches are split until there are so many steps.

        windows: which shards are open together.
        demand: what is trained, with the remainders settled; changes: how that differs from `asked`.
        items: [T] images, bucket after bucket.
        batches: global batches of one bucket each, cut from `items`.
        layout: what is trained in one step each; where buckets meet in a step, `met` says how.
        order: [S] numbers of the steps in `layout`, in the order of training.
    """

    options: PlanOptions
    context: RemainderContext
    seed: int
    epoch: int
    part: int
    ranks: int
    global_batch: npt.NDArray[np.int64]
    asked: Demand
    epoch_asked: Demand
    shards: npt.NDArray[np.int32] | None
    least_steps: int

    windows: Windows | None = None
    demand: Demand = field(init=False)
    changes: list[Rows] = field(init=False)
    items: npt.NDArray[np.int32] = field(init=False)
    batches: BatchLayout = field(init=False)
    layout: BatchLayout = field(init=False)
    met: EqualCost | None = None
    order: npt.NDArray[np.intp] = field(init=False)

    def __post_init__(self) -> None:
        self.random = stream(Purpose.STEPS, self.seed, self.epoch, self.part)  # of everything behind the cutting

    @property
    def costs(self) -> npt.NDArray[np.float64]:
        """[K] of an image of each bucket; all alike where neither tokens nor sizes are known."""
        return np.ones(len(self.global_batch)) if self.options.item_costs is None else self.options.item_costs

    def plan(self, fingerprint: Mapping[str, Any], *, moves: bool) -> EpochPlan:
        """The plan, without its ledger; `moves` as in `EpochPlan`, but for what the remainders move."""
        met, order = self.met, self.order
        return EpochPlan(
            world_size=self.ranks,
            global_batch=self.global_batch,
            accumulate=self.options.accumulate,
            seed=self.seed,
            epoch=self.epoch,
            images=fingerprint["images"],
            asked=self.asked.trainings,
            items=self.items if met is None else self.items[met.take],
            start=self.layout.start[order],
            length=self.layout.length[order],
            bucket_of_step=self.layout.bucket[order] if met is None else met.numbered(order),
            moves=moves or any((rows["delta"] == 0).any() for rows in self.changes),
            fingerprint={**fingerprint, "seed": self.seed, "epoch": self.epoch},
            bucket_sizes=self.options.sizes,
            item_costs=self.options.item_costs,
            mixed=MixedSteps() if met is None else met.mixed,
        )


def planned(draft: Draft, fingerprint: Mapping[str, Any], *, moves: bool) -> EpochPlan:
    """The plan that the stages make of a draft; arguments as of `Draft.plan`."""
    for stage in _STAGES:
        stage(draft)
    plan = draft.plan(fingerprint, moves=moves)
    if draft.options.largest_first:
        plan = _largest_first(plan)
    return plan.with_ledger(draft.asked.trainings, draft.changes)


def settled(
    options: PlanOptions,
    context: RemainderContext,
    full_batch: npt.NDArray[np.int64],
    demand: Demand,
    epoch_asked: Demand,
    part: int = 0,
) -> tuple[Demand, list[Rows]]:
    """A demand without what does not fill `full_batch`, [K], as the options have it, and what that changes."""
    # What is left of an epoch trains where it was asked: caches that hold the moves of whole epochs need not hold
    # those for every step at which a run may stop.
    policies = tuple(KEEP if part and policy.moves_images else policy for policy in options.policies)
    return apply_policies(policies, demand, epoch_asked, replace(context, global_batch=full_batch))


def _open_windows(draft: Draft) -> None:
    """Decide which shards are open together: a shard is read in one window, and no other."""
    if draft.shards is not None:
        from kohya_bucket.planning.windows import Windows

        rng = stream(Purpose.SHARDS, draft.seed, draft.epoch, draft.part)
        options = draft.options
        draft.windows = Windows.drawn(
            draft.shards, draft.asked, draft.global_batch, options.open_shards, options.nodes, rng
        )


def _settle_remainders(draft: Draft) -> None:
    """Leave out, repeat or move images so that batches are full; the ledger names each of these changes."""
    full = draft.global_batch // draft.ranks if draft.options.by_cost else draft.global_batch
    draft.demand, draft.changes = settled(
        draft.options, draft.context, full, draft.asked, draft.epoch_asked, draft.part
    )


def _cut_batches(draft: Draft) -> None:
    """Shuffle each bucket's images and cut them into global batches; with windows, those of each by themselves."""
    windows = draft.windows
    shuffle = draft.options.arrangement.shuffles
    if windows is not None and windows.nodes > 1:
        shuffle = False  # they are when they are dealt out to the nodes
    rng = stream(Purpose.IMAGES, draft.seed, draft.epoch, draft.part)
    parts = None if windows is None else windows.parts
    draft.items, counts = sequence_items(draft.demand, rng, shuffle=shuffle, parts=parts)
    draft.batches = cut_batches(counts, draft.global_batch)


def _fill_all_ranks(draft: Draft) -> None:
    """Make steps of the batches: where buckets may meet, what has no batch for each rank meets others of its cost.

    There are `least_steps` behind this, wherever that can be.
    """
    if not draft.options.by_cost:
        draft.layout = draft.batches = split_batches(draft.batches, draft.least_steps)
        return
    rng = draft.random if draft.options.arrangement.shuffles else None
    draft.met = equal_cost(draft.batches, draft.global_batch, draft.ranks, draft.costs, rng, draft.least_steps)
    draft.layout = draft.met.layout


def _order_steps(draft: Draft) -> None:
    """Order the steps by the option; with windows, all steps of one before those of the next."""
    arrange, length = draft.options.arrangement.arrange, draft.options.run_length
    if draft.windows is None:
        draft.order = arrange(draft.layout, draft.random, length)
        return
    draft.batches, turn = draft.windows.grouped(draft.items, draft.layout, draft.random)
    order = arrange(draft.batches, draft.random, length)
    draft.order = order[np.argsort(turn[order], kind="stable")]


def _separate_repeats(draft: Draft) -> None:
    """Exchange images of one bucket (and window) so that no batch holds one twice, if that can be."""
    if draft.options.arrangement.shuffles and draft.demand.times is not None:
        separate_repeats(draft.items, draft.batches, draft.random)


_STAGES = (_open_windows, _settle_remainders, _cut_batches, _fill_all_ranks, _order_steps, _separate_repeats)


def _largest_first(plan: EpochPlan) -> EpochPlan:
    """The same steps, with the one that costs a rank most of each shape at the head."""
    buckets = np.stack([plan.rank_buckets(rank) for rank in range(plan.world_size)], axis=1)
    return _in_order(plan, with_largest_first(buckets, rank_costs(plan)))


BEGUN_WITH = "begun_with"
"""Key of a plan's fingerprint, where a step comes before all others that the options do not put there: its number."""


def begun_with(plan: EpochPlan, step: int) -> EpochPlan:
    """The same steps, with one of them before all others.

    Raises:
        PlanError: the plan has no such step.
    """
    if whole("begun_with", step, 0) >= plan.steps:
        raise PlanError(f"the epoch is said to begin with step {step}, but has only {plan.steps}")
    order = np.concatenate([[step], np.delete(np.arange(plan.steps), step)])
    return replace(_in_order(plan, order), fingerprint={**plan.fingerprint, BEGUN_WITH: step})


def costliest_first(plan: EpochPlan) -> EpochPlan:
    """The same steps, begun with the one that costs a rank most: what does not fit into memory fails at once."""
    if plan.item_costs is None or not plan.steps:
        return plan
    step = int(rank_costs(plan).max(axis=1).argmax())
    return begun_with(plan, step) if step else plan


def _in_order(plan: EpochPlan, order: npt.NDArray[np.intp]) -> EpochPlan:
    return replace(plan, start=plan.start[order], length=plan.length[order], bucket_of_step=plan.bucket_of_step[order])
