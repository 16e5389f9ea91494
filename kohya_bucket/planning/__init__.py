"""From bucket numbers to batches: what every rank trains in every step. numpy only; no files, no global state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import lazy_names

if TYPE_CHECKING:
    from kohya_bucket.planning.batch_sizes import tokens_that_fit as tokens_that_fit
    from kohya_bucket.planning.idle import dealt_costs as dealt_costs
    from kohya_bucket.planning.idle import idle_share as idle_share
    from kohya_bucket.planning.idle import idle_share_of as idle_share_of
    from kohya_bucket.planning.idle import lost_share as lost_share
    from kohya_bucket.planning.idle import lost_share_of as lost_share_of
    from kohya_bucket.planning.idle import trained_cost as trained_cost
    from kohya_bucket.planning.ledger import Ledger as Ledger
    from kohya_bucket.planning.ledger import LedgerReason as LedgerReason
    from kohya_bucket.planning.options import PlanOptions as PlanOptions
    from kohya_bucket.planning.orders import ORDERS as ORDERS
    from kohya_bucket.planning.plan import EpochPlan as EpochPlan
    from kohya_bucket.planning.plan import rank_costs as rank_costs
    from kohya_bucket.planning.planner import EpochPlanner as EpochPlanner
    from kohya_bucket.planning.planner import never_full as never_full
    from kohya_bucket.planning.planner import never_trained as never_trained
    from kohya_bucket.planning.planner import plan_epoch as plan_epoch
    from kohya_bucket.planning.remainders import REMAINDERS as REMAINDERS
    from kohya_bucket.planning.resolutions import RESOLUTION_MODES as RESOLUTION_MODES
    from kohya_bucket.planning.resume import EpochPosition as EpochPosition
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {
        "batch_sizes": "tokens_that_fit",
        "idle": "dealt_costs idle_share idle_share_of lost_share lost_share_of trained_cost",
        "ledger": "Ledger LedgerReason",
        "options": "PlanOptions",
        "orders": "ORDERS",
        "plan": "EpochPlan rank_costs",
        "planner": "EpochPlanner never_full never_trained plan_epoch",
        "remainders": "REMAINDERS",
        "resolutions": "RESOLUTION_MODES",
        "resume": "EpochPosition",
    })  # fmt: skip
