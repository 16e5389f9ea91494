"""What becomes of the images that do not fill a global batch. One policy per file.

Each is `(demand, context) -> (demand, changes)`: it changes what is asked for before batches are cut, and says
so in rows for the ledger.
"""

from kohya_bucket.planning.remainders.catch_all import catch_all
from kohya_bucket.planning.remainders.context import RemainderContext
from kohya_bucket.planning.remainders.drop import drop
from kohya_bucket.planning.remainders.keep import keep
from kohya_bucket.planning.remainders.merge import merge
from kohya_bucket.planning.remainders.pad import pad

__all__ = ["REMAINDERS", "RemainderContext", "catch_all", "drop", "keep", "merge", "pad"]

REMAINDERS = {"keep": keep, "pad": pad, "drop": drop, "merge": merge, "catch_all": catch_all}
