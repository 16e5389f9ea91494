"""Sizes of a trainer's images: read from headers once, and kept between runs and commands.

Large datasets get a `MetadataCache` in the user's cache folder without being asked; small ones are read faster than a
cache is opened.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kohya_bucket.checks import is_first_process
from kohya_bucket.errors import KohyaBucketError, UnreadableError, reading
from kohya_bucket.files import user_cache
from kohya_bucket.images import read_sizes
from kohya_bucket.images.parallel import Progress
from kohya_bucket.images.sizes import SizeScan
from kohya_bucket.inputs import may_be_file
from kohya_bucket.texts import one_line
from kohya_bucket.trainers.door.ranks import warn_once

if TYPE_CHECKING:
    from kohya_bucket.images.metadata_cache import MetadataCache

logger = logging.getLogger("kohya_bucket")
AUTOMATIC_FROM = 5_000


def scan_sizes(paths: Sequence[str], setting: str = "auto", progress: Progress | None = None) -> SizeScan:
    """Sizes of N files.

    Args:
        setting: `auto`, `off`, or the path of a cache file to keep (Parquet).
    """
    file = cache_file(paths, setting)
    if file is None:
        return read_sizes(paths, progress=progress)
    from kohya_bucket.images.metadata_cache import MetadataCache, is_metadata_cache

    cache, writable = None, True
    try:
        with reading(file):
            is_empty = file.stat().st_size == 0
            cache = MetadataCache.load(file) if file.is_file() else None
    except KohyaBucketError as error:
        passes = isinstance(error, UnreadableError)
        writable = not passes and (setting == "auto" or is_empty or is_metadata_cache(str(file)))
        then = "it is created again" if writable else "it stays as it is, and no sizes are kept"
        logger.warning("%s; %s", one_line(error), then)
    except (FileNotFoundError, ValueError):  # there is none yet, or it is a name that no file can have
        pass
    fresh = MetadataCache.build(paths, progress=progress) if cache is None else cache.refresh(paths, progress=progress)
    changes = fresh.changes
    changed = cache is None or changes is None or bool(changes.reread or changes.added)
    if changed and writable and is_first_process():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            (fresh if cache is None else _with_others(fresh, cache)).save(file)
            logger.info("image sizes kept in %s", one_line(file))
        except (KohyaBucketError, OSError, ValueError) as error:  # a name that no file can have
            logger.warning("image sizes could not be kept: %s", one_line(error))
    return fresh.scan()


def _with_others(fresh: MetadataCache, before: MetadataCache) -> MetadataCache:
    """The rows, and those of other files that are still there: datasets of one config may share a file."""
    if fresh.changes is None or not fresh.changes.dropped:
        return fresh
    others = before.where(fresh.paths.find(before.paths) < 0)
    return fresh.joined(others.where(np.array([may_be_file(path) for path in others.paths], dtype=np.bool_)))


def cache_file(paths: Sequence[str], setting: str) -> Path | None:
    """Where the sizes of `paths` are kept; None where they are not."""
    if setting == "off":
        return None
    if setting != "auto":
        return Path(setting)
    if len(paths) < AUTOMATIC_FROM or importlib.util.find_spec("pyarrow") is None:
        return None
    folders = sorted({os.path.abspath(folder) for folder in {os.path.dirname(path) for path in paths}})  # noqa: PTH100, PTH120
    try:
        folder = user_cache() / "sizes"
    except KohyaBucketError as error:
        warn_once(f"no image sizes are kept: {error}")
        return None
    name = hashlib.sha256("\n".join(folders).encode("utf-8", "surrogateescape")).hexdigest()[:24]
    return folder / f"{name}.parquet"
