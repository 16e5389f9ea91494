"""Lists of tar shards that others have written: webdataset's `wids` index, and webshart's index of one shard.

A `wids` index names shards and says how many samples and bytes each has, and no sizes of images. webshart's has where
each member of one tar lies, and with `--include-image-geometry` how large its image is: then no tar is opened.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.remote import is_url, read_remote
from kohya_bucket.images.size_table import MAX_SIDE
from kohya_bucket.texts import parse_json, read_text

__all__ = ["Member", "Shard", "is_shard_list", "listed_shards"]

_KNOWN = 1  # the version of `wids` indices


@dataclass(frozen=True)
class Member:
    """A member of a tar: its name, where its bytes lie, and (width, height) of its image as stored, where known."""

    name: str
    offset: int
    length: int
    size: tuple[int, int] | None


@dataclass(frozen=True)
class Shard:
    """A tar: path or URL; its bytes, where a list says so; its members in their order, where an index has them."""

    path: str
    nbytes: int | None = None
    members: tuple[Member, ...] | None = None
    index: str = ""


def is_shard_list(path: str | os.PathLike[str]) -> bool:
    """Whether a JSON file is one of these lists, and no table of sizes."""
    if not str(path).lower().endswith(".json") or not (is_url(str(path)) or Path(path).is_file()):
        return False
    try:
        data = _json(str(path))
    except KohyaBucketError:
        return False
    return isinstance(data, dict) and ("wids_version" in data or _files(data) is not None)


def listed_shards(names: Iterable[str | os.PathLike[str]]) -> list[Shard]:
    """The shards that tars and lists name, in their order.

    Raises:
        KohyaBucketError: a list that cannot be read, or of an unknown version.
    """
    found: list[Shard] = []
    for name in [os.fspath(given) for given in names]:
        if not name.lower().endswith(".json"):
            found.append(Shard(_absolute(name)))
            continue
        data = _json(name)
        if isinstance(data, dict) and "wids_version" in data:
            found += _of_wids(name, data)
        elif isinstance(data, dict) and _files(data) is not None:
            found.append(_of_webshart(name, data))
        else:
            raise KohyaBucketError(f"{name}: neither an index of wids (wids_version) nor one of webshart (files)")
    return found


def _absolute(name: str) -> str:
    return name if is_url(name) else str(Path(name).absolute())


def _json(name: str) -> Any:
    try:
        return parse_json(read_remote(name).decode("utf-8") if is_url(name) else read_text(name, None))
    except KohyaBucketError:
        raise
    except (OSError, ValueError) as error:
        raise KohyaBucketError(f"{name}: this list of shards cannot be read ({error})") from error


def _beside(name: str, other: str) -> str:
    """The path or URL `other`, which a list at `name` states; an absolute one is as it is."""
    if is_url(other):
        return other
    if is_url(name):
        place = urlsplit(name)
        return place._replace(path=posixpath.normpath(posixpath.join(posixpath.dirname(place.path), other))).geturl()
    return str(Path(os.path.abspath(Path(name).parent / other)))


def _of_wids(name: str, data: Mapping[str, Any]) -> list[Shard]:
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
        path = _beside(name, url)
        index = path.removesuffix(".tar") + ".json"
        shard = Shard(path, entry.get("filesize") if isinstance(entry.get("filesize"), int) else None)
        if not is_url(index) and index != path and Path(index).is_file() and _files(_json(index)) is not None:
            described = _of_webshart(index, _json(index))
            shard = Shard(path, shard.nbytes or described.nbytes, described.members, index)
        shards.append(shard)
    return shards


def _of_webshart(name: str, data: Mapping[str, Any]) -> Shard:
    stated = data.get("path")
    # Only its own name counts: the folder is that of the machine on which the index was made.
    tar = posixpath.basename(stated.replace("\\", "/")) if isinstance(stated, str) else ""
    tar = tar or posixpath.basename(name.replace("\\", "/"))[: -len(".json")] + ".tar"
    nbytes = data.get("filesize")
    members = sorted((_member(name, *pair) for pair in _files(data) or ()), key=lambda member: member.offset)
    return Shard(_beside(name, tar), nbytes if isinstance(nbytes, int) else None, tuple(members), name)


def _files(data: Any) -> Sequence[tuple[Any, Any]] | None:
    files = data.get("files") if isinstance(data, Mapping) else None
    if isinstance(files, Mapping) and all(isinstance(entry, Mapping) for entry in files.values()):
        return list(files.items())
    if isinstance(files, list) and all(isinstance(entry, Mapping) for entry in files):
        return [(next((e[k] for k in ("path", "filename", "fname") if k in e), None), e) for e in files]
    return None


def _member(index: str, name: Any, entry: Mapping[str, Any]) -> Member:
    offset, length = (_number(entry.get(key)) for key in ("offset", "length" if "length" in entry else "size"))
    if not isinstance(name, str) or offset is None or length is None:
        raise KohyaBucketError(f"{index}: {name!r} is at {dict(entry)!r}, but must have an offset and a length")
    if entry.get("width") is None or entry.get("height") is None:
        return Member(name, offset, length, None)
    width, height = _number(entry["width"]), _number(entry["height"])
    if not width or not height or max(width, height) > MAX_SIDE:
        raise KohyaBucketError(f"{index}: {name!r} has an impossible size of {entry['width']}x{entry['height']}")
    return Member(name, offset, length, (width, height))


def _number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1 << 62 else None
