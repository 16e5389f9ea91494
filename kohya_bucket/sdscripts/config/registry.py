"""The growing image list of one dataset: entries under keys, as sd-scripts' `register_image` keeps them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kohya_bucket.adapter.findings import Findings
from kohya_bucket.sdscripts.config.model import ImageList, SubsetConfig
from kohya_bucket.texts import some

__all__ = ["Entry", "Registry"]


@dataclass(slots=True)
class Entry:
    """One image; `size` is the size that metadata states, or None."""

    key: str
    path: str
    repeats: int
    subset: int
    size: tuple[int, int] | None = None
    is_reg: bool = False
    conditioning: str = ""


class Registry:
    """Entries in the order of their first registration; a later entry of the same key takes its place.

    `skipped` collects (key, reason) of the images that are left out for their size.
    """

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.skipped: list[tuple[str, str]] = []
        self._replaced: dict[tuple[int, int], list[str]] = {}

    def add(self, entry: Entry) -> None:
        """Register an image."""
        before = self.entries.get(entry.key)
        if before is not None:
            self._replaced.setdefault((before.subset, entry.subset), []).append(entry.key)
        self.entries[entry.key] = entry

    def report(self, subsets: tuple[SubsetConfig, ...], findings: Findings) -> None:
        """Name images that two subsets hold under one key."""
        for (first, second), keys in self._replaced.items():
            findings.warning(
                "same-key",
                subsets[second - 1].place,
                f"{len(keys)} image{'s' * (len(keys) != 1)} also in subset {first} under the same name; sd-scripts "
                f"keeps one of each, with the repeats and captions of subset {second} ({some(keys)})",
                "give metadata unique keys (longer or absolute paths), or remove the doubled folder",
                keys,
            )

    def as_list(self, predefined: tuple[tuple[int, int], ...] | None = None) -> ImageList:
        """The entries as columns."""
        entries = list(self.entries.values())
        count = len(entries)
        sizes = np.array([e.size or (0, 0) for e in entries], dtype=np.int32).reshape(count, 2)
        return ImageList(
            keys=tuple(e.key for e in entries),
            paths=tuple(e.path for e in entries),
            stated_sizes=sizes,
            repeats=np.array([e.repeats for e in entries], dtype=np.int64),
            is_reg=np.array([e.is_reg for e in entries], dtype=np.bool_),
            subset=np.array([e.subset for e in entries], dtype=np.int32),
            conditioning=tuple(e.conditioning for e in entries) if any(e.conditioning for e in entries) else (),
            predefined=predefined,
            skipped=tuple(self.skipped),
        )
