"""Tar shards on a command line: the tars themselves, or an index of them by wids or webshart."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.remote import is_url, list_remote

if TYPE_CHECKING:
    from kohya_bucket.images.tar_index import TarIndex

__all__ = ["matches", "refuse_other_kinds", "shards_in", "tars_in"]

_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


def tars_in(sources: Sequence[str], before: Path | None = None) -> TarIndex | None:
    """The index of the shards that are named; None where no tar and no index of tars is.

    Args:
        before: a file with an earlier index, of which shards that have not changed are taken.

    Raises:
        KohyaBucketError: tars beside something else, or one that cannot be read.
    """
    shards = shards_in(sources)
    if shards is None:
        return None
    from kohya_bucket.images.tar_index import TarIndex

    return TarIndex.build(shards, before=None if before is None else TarIndex.load(before))


def shards_in(sources: Sequence[str]) -> list[str] | None:
    """The tars, and lists of them, that are named, each once; None where none is.

    Raises:
        KohyaBucketError: tars beside something else, or compressed ones.
    """
    names = list(dict.fromkeys(matches(sources, (".tar",))))
    if packed := next((name for name in names if name.lower().endswith(_PACKED)), None):
        raise KohyaBucketError(
            f"{packed}: is compressed, so that its images cannot be read at random: unpack it to a plain .tar"
        )
    # Several JSON files can be nothing else; of a single one, what is in it decides.
    endings = (".tar", ".json") if len(names) > 1 else (".tar",)
    shards = [name for name in names if name.lower().endswith(endings) or _is_index(name)]
    if not shards:
        return None
    refuse_other_kinds(names, shards, "is a tar shard or lists some")
    return shards


def refuse_other_kinds(names: Sequence[str], of_a_kind: Sequence[str], what: str) -> None:
    """Refuse sources of several kinds; `what` says of `of_a_kind` which they are."""
    if len(of_a_kind) < len(names):
        known = set(of_a_kind)
        other = next(name for name in names if name not in known)
        raise KohyaBucketError(f"{of_a_kind[0]} {what}, and {other} is none: name one kind alone")


def matches(sources: Sequence[str], endings: Sequence[str]) -> list[str]:
    """What patterns match, and the other sources as they are; of addresses those with one of `endings`."""
    return [name for source in sources for name in _matches(source, endings)]


def _matches(source: str, endings: Sequence[str]) -> list[str]:
    if is_url(source):
        wanted = glob.has_magic(source) and source.lower().endswith(tuple(endings))
        return list_remote(source, True, endings) or [source] if wanted else [source]
    return sorted(glob.glob(source)) if glob.has_magic(source) and not Path(source).exists() else [source]  # noqa: PTH207


def _is_index(name: str) -> bool:
    if not name.lower().endswith(".json"):
        return False
    from kohya_bucket.images.shard_lists import is_shard_list

    return is_shard_list(name)
