"""The image files behind a store's items: there, gone, or changed since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.images.origins import Origins
from kohya_bucket.latents.store.latent_store import LatentStore

__all__ = ["SourceState", "check_sources", "source_changed"]


def source_changed(
    store: LatentStore, rows: npt.NDArray[Any], nbytes: npt.NDArray[np.int64], mtimes: npt.NDArray[np.int64],
    inside: npt.NDArray[np.bool_], hash_of: Callable[[int], str], *, always: bool,
) -> npt.NDArray[np.bool_]:  # fmt: skip
    """[M] bool: the image is not what was encoded. Contents are compared where only the time differs, or always.

    `inside` says which images lie in a file with others, so that its length alone decides nothing.
    """
    other_length = store.column("source_bytes")[rows] != nbytes
    other_time = store.column("source_mtime_ns")[rows] != mtimes
    out = other_length | other_time
    for k in np.flatnonzero((inside | ~other_length) & (out | always)):
        stored = store.table["source_hash"][int(rows[k])].as_py()
        if stored:
            try:
                out[k] = stored != hash_of(int(k))
            except (OSError, KohyaBucketError):
                out[k] = True
    return np.asarray(out)


@dataclass
class SourceState:
    """State of the image files behind a store's items, [N] bool each."""

    absent: npt.NDArray[np.bool_]
    changed: npt.NDArray[np.bool_]

    @classmethod
    def none(cls, items: int) -> SourceState:
        """Of items that are made from no files."""
        return cls(np.zeros(items, dtype=bool), np.zeros(items, dtype=bool))


def check_sources(store: LatentStore, paths: list[str], *, content: bool = False) -> SourceState:
    """Look at the file behind each item; `paths` has one path per item of the store.

    With `content`, files whose hash is stored are read in full, so that an edit that kept length and time shows.
    """
    images = Origins.named(paths)
    nbytes, mtimes = images.stamps()
    absent = nbytes < 0
    rows = np.flatnonzero(~absent)
    changed = np.zeros(len(store), dtype=bool)
    changed[rows] = source_changed(
        store, rows, nbytes[rows], mtimes[rows], images.inside[rows], lambda k: images.hash(int(rows[k])),
        always=content,
    )  # fmt: skip
    return SourceState(absent, changed)
