"""What becomes of the images that do not fill a global batch. One policy per file."""

from kohya_bucket.checks import one_of
from kohya_bucket.errors import PlanError
from kohya_bucket.planning.policy import RemainderPolicy
from kohya_bucket.planning.remainders.catch_all import CATCH_ALL
from kohya_bucket.planning.remainders.drop import DROP
from kohya_bucket.planning.remainders.keep import KEEP
from kohya_bucket.planning.remainders.merge import MERGE
from kohya_bucket.planning.remainders.pad import PAD

__all__ = ["REMAINDERS", "checked_small_buckets", "policies_of"]

REMAINDERS: dict[str, RemainderPolicy] = {policy.name: policy for policy in (KEEP, PAD, DROP, MERGE, CATCH_ALL)}
"""By name, as they are offered."""


def policies_of(remainder: str, small_buckets: str | None) -> tuple[RemainderPolicy, ...]:
    """What `remainder` names; and where it leaves images out, for buckets that never fill a batch, another policy."""
    policy = REMAINDERS[remainder]
    small = REMAINDERS[small_buckets or KEEP.name]
    return (policy,) if not policy.leaves_out or small is policy else (policy, small)


def checked_small_buckets(remainder: str, small_buckets: str | None) -> str | None:
    """The option `small_buckets`, beside `remainder`.

    Raises:
        PlanError: it names no policy, or `remainder` leaves no bucket out.
    """
    if small_buckets is None:
        return None
    if not REMAINDERS[one_of("remainder", remainder, REMAINDERS)].leaves_out:
        raise PlanError(
            f"small_buckets is {small_buckets!r}, but remainder={remainder!r} trains the images of all buckets: leave "
            "small_buckets out, or take remainder='drop'"
        )
    return one_of("small_buckets", small_buckets, REMAINDERS)
