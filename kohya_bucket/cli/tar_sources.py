"""Tar shards on a command line: the tars themselves, or an index of them by wids or webshart."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kohya_bucket.errors import KohyaBucketError

if TYPE_CHECKING:
    from kohya_bucket.images.tars.tar_index import TarIndex

__all__ = ["tars_in"]


def tars_in(sources: Sequence[str], before: Path | None = None) -> TarIndex | None:
    """The index of the shards that are named; None where no tar and no index of tars is.

    Args:
        before: a file with an earlier index, of which shards that have not changed are taken.

    Raises:
        KohyaBucketError: tars beside something else, or one that cannot be read.
    """
    names = [name for source in sources for name in _matches(source)]
    # Several JSON files can be nothing else; of a single one, what is in it decides.
    endings = (".tar", ".json") if len(names) > 1 else (".tar",)
    shards = [name for name in names if name.lower().endswith(endings) or _is_index(name)]
    if not shards:
        return None
    if len(shards) < len(names):
        other = next(name for name in names if name not in shards)
        raise KohyaBucketError(f"{shards[0]} is a tar shard or lists some, and {other} does not: name one kind alone")
    from kohya_bucket.images.tars.tar_index import TarIndex

    return TarIndex.build(shards, before=None if before is None else TarIndex.load(before))


def _matches(source: str) -> list[str]:
    return sorted(glob.glob(source)) if glob.has_magic(source) and not Path(source).exists() else [source]  # noqa: PTH207


def _is_index(name: str) -> bool:
    if not name.lower().endswith(".json"):
        return False
    from kohya_bucket.images.tars.shard_lists import is_shard_list

    return is_shard_list(name)
