"""Tar shards by their names, or by a `wids` index of webdataset, which names them and says how many bytes each has."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.remote import is_url, read_remote
from kohya_bucket.texts import parse_json, read_text

_KNOWN = 1  # the version of `wids` indices


class Shard(NamedTuple):
    """A tar: path or URL; its bytes, where an index says so."""

    path: str
    nbytes: int | None = None


def is_shard_list(path: str | os.PathLike[str]) -> bool:
    """Whether a JSON file is such an index, and no table of sizes."""
    if not str(path).lower().endswith(".json") or not (is_url(str(path)) or Path(path).is_file()):
        return False
    try:
        data = _json(str(path))
    except KohyaBucketError:
        return False
    return isinstance(data, dict) and "wids_version" in data


def listed_shards(names: Iterable[str | os.PathLike[str]]) -> list[Shard]:
    """The shards that tars and indices name, in their order.

    Raises:
        KohyaBucketError: an index that cannot be read, or of an unknown version.
    """
    found: list[Shard] = []
    for name in (os.fspath(given) for given in names):
        if name.lower().endswith(".json"):
            found += _of_wids(name, _json(name))
        else:
            found.append(Shard(name if is_url(name) else str(Path(name).absolute())))
    return found


def _json(name: str) -> Any:
    try:
        return parse_json(read_remote(name).decode("utf-8") if is_url(name) else read_text(name, None))
    except KohyaBucketError:
        raise
    except (OSError, ValueError) as error:
        raise KohyaBucketError(f"{name}: this list of shards cannot be read ({error})") from error


def _of_wids(name: str, data: Any) -> list[Shard]:
    if not isinstance(data, Mapping) or "wids_version" not in data:
        raise KohyaBucketError(f"{name}: no index of wids (it has no wids_version): name the tar files themselves")
    if data["wids_version"] != _KNOWN:
        raise KohyaBucketError(f"{name}: a wids index of version {data['wids_version']!r}; this release reads {_KNOWN}")
    if data.get("datasets"):
        raise KohyaBucketError(f"{name}: a wids index that refers to other indices: name those instead")
    stated = data.get("shardlist")
    if not isinstance(stated, list) or not stated:
        raise KohyaBucketError(f"{name}: a wids index without shards (its shardlist is {stated!r})")
    shards = []
    for entry in stated:
        url = entry.get("url") if isinstance(entry, Mapping) else None
        if not isinstance(url, str) or not url:
            raise KohyaBucketError(f"{name}: a shard of this wids index has no url, but is {entry!r}")
        shards.append(Shard(_beside(name, url), entry["filesize"] if type(entry.get("filesize")) is int else None))
    return shards


def _beside(name: str, other: str) -> str:
    """The path or URL `other`, which a list at `name` states; an absolute one is as it is."""
    if is_url(other):
        return other
    if is_url(name):
        place = urlsplit(name)
        return place._replace(path=posixpath.normpath(posixpath.join(posixpath.dirname(place.path), other))).geturl()
    return str(Path(os.path.abspath(Path(name).parent / other)))
