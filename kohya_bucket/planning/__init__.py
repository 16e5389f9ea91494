"""From bucket numbers to batches: what every rank trains in every step. numpy only; no files, no global state."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kohya_bucket.extras import importer

if TYPE_CHECKING:
    from kohya_bucket.planning.costs import CostFit, fit_cost, measure_cost
    from kohya_bucket.planning.idle import (
        dealt_costs,
        idle_share,
        idle_share_independent,
        idle_share_of,
        independent_costs,
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
    __getattr__ = importer(
        __name__,
        {
            "kohya_bucket.planning.costs": ["CostFit", "fit_cost", "measure_cost"],
            "kohya_bucket.planning.idle": [
                "dealt_costs",
                "idle_share",
                "idle_share_independent",
                "idle_share_of",
                "independent_costs",
                "lost_share",
                "lost_share_of",
                "rank_costs",
                "trained_cost",
            ],
            "kohya_bucket.planning.ledger": ["Ledger", "LedgerReason"],
            "kohya_bucket.planning.options": ["PlanOptions"],
            "kohya_bucket.planning.orders": ["ORDERS"],
            "kohya_bucket.planning.packs": ["PackPlan", "plan_packs"],
            "kohya_bucket.planning.plan": ["EpochPlan"],
            "kohya_bucket.planning.planner": ["EpochPlanner", "never_full", "never_trained", "plan_epoch"],
            "kohya_bucket.planning.remainders": ["REMAINDERS"],
            "kohya_bucket.planning.resolutions": ["RESOLUTION_MODES"],
            "kohya_bucket.planning.resume": ["EpochPosition"],
        },
    )

__all__ = [
    "ORDERS",
    "REMAINDERS",
    "RESOLUTION_MODES",
    "CostFit",
    "EpochPlan",
    "EpochPlanner",
    "EpochPosition",
    "Ledger",
    "LedgerReason",
    "PackPlan",
    "PlanOptions",
    "dealt_costs",
    "fit_cost",
    "idle_share",
    "idle_share_independent",
    "idle_share_of",
    "independent_costs",
    "lost_share",
    "lost_share_of",
    "measure_cost",
    "never_full",
    "never_trained",
    "plan_epoch",
    "plan_packs",
    "rank_costs",
    "trained_cost",
]
