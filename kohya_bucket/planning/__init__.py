"""From bucket numbers to batches: what every rank trains in every step. numpy only; no files, no global state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.planning.costs import CostFit, fit_cost, measure_cost
    from kohya_bucket.planning.idle import (
        dealt_costs,
        idle_share,
        idle_share_of,
        lost_share,
        lost_share_of,
        rank_costs,
        trained_cost,
    )
    from kohya_bucket.planning.ledger import Ledger, LedgerReason
    from kohya_bucket.planning.options import PlanOptions
    from kohya_bucket.planning.orders import ORDERS
    from kohya_bucket.planning.packs import PackPlan, plan_packs
    from kohya_bucket.planning.plan import EpochPlan
    from kohya_bucket.planning.planner import EpochPlanner, never_full, never_trained, plan_epoch
    from kohya_bucket.planning.remainders import REMAINDERS
    from kohya_bucket.planning.resolutions import RESOLUTION_MODES
    from kohya_bucket.planning.resume import EpochPosition
else:
    _HOMES = {
        "costs": "CostFit fit_cost measure_cost",
        "idle": "dealt_costs idle_share idle_share_of lost_share lost_share_of rank_costs trained_cost",
        "ledger": "Ledger LedgerReason",
        "options": "PlanOptions",
        "orders": "ORDERS",
        "packs": "PackPlan plan_packs",
        "plan": "EpochPlan",
        "planner": "EpochPlanner never_full never_trained plan_epoch",
        "remainders": "REMAINDERS",
        "resolutions": "RESOLUTION_MODES",
        "resume": "EpochPosition",
    }  # fmt: skip
    __getattr__ = importer(__name__, {f"{__name__}.{home}": names.split() for home, names in _HOMES.items()})

__all__ = [
    "ORDERS", "REMAINDERS", "RESOLUTION_MODES", "CostFit", "EpochPlan", "EpochPlanner", "EpochPosition", "Ledger",
    "LedgerReason", "PackPlan", "PlanOptions", "dealt_costs", "fit_cost", "idle_share", "idle_share_of", "lost_share",
    "lost_share_of", "measure_cost", "never_full", "never_trained", "plan_epoch", "plan_packs", "rank_costs",
    "trained_cost",
]  # fmt: skip
