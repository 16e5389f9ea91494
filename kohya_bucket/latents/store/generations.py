"""The store's own count of what was written into it, by which of two rows with one key the later is known.

No clock says it: one that runs ahead would make what it wrote newest for ever. A writer takes numbers above all that it
sees on disk when it commits, so whoever commits later has the greater ones. Writers that commit at the same instant may
take the same numbers; of these rows every reader takes the one whose shard's name is the last. A row that was not seen
by who replaced it is stale to the next run, which sees it and counts on from there.

The numbers are in the column `written_ns`, which held the time in nanoseconds before stores counted: those are numbers
like any other, to be exceeded.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.store.contents import manifest_of, self_described
from kohya_bucket.latents.store.entries import arrow
from kohya_bucket.latents.store.layout import Layout

__all__ = ["Assigned", "Generations"]


class Assigned:
    """Numbers and names that one process gives another, so that whoever does that work writes the same files.

    Args:
        above: a number that nothing in the store exceeds.
        key: names what is written; no other work has it.

    Attributes:
        shards: names of those that were written.
    """

    def __init__(self, above: int, key: str) -> None:
        self._above = above
        self._key = key
        self.shards: list[str] = []

    def greatest(self) -> int:
        return self._above

    def tag(self) -> str:
        return hashlib.blake2b(f"{self._key} {self._above} {len(self.shards)}".encode(), digest_size=8).hexdigest()

    def is_mine(self, name: str) -> None:
        self.shards.append(name)


class Generations:
    """The greatest number that others have taken in a store, as one writer sees it."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._seen: set[str] = set()
        self._greatest = 0

    def greatest(self) -> int:
        """The greatest number on disk now, in files that can be read; each is read once."""
        if not self._seen:
            self._look_at_the_manifest()
        for name, nbytes in self._layout.shard_sizes().items():
            if name not in self._seen:
                self._seen.add(name)
                with suppress(LatentStoreError, OSError):
                    self._count(self_described(self._layout, name, nbytes)[0])
        return self._greatest

    def tag(self) -> str:
        """What the next shard's name ends with; "" for what no other shard's does."""
        return ""

    def is_mine(self, name: str) -> None:
        """Leave out a shard that this writer is about to write: it knows its own numbers."""
        self._seen.add(name)

    def _look_at_the_manifest(self) -> None:
        for path in self._layout.manifests():
            with suppress(LatentStoreError, OSError):
                table, shards, _ = manifest_of(self._layout, path, {})
                self._count(table)
                self._seen.update(shards)
                return

    def _count(self, table: object) -> None:
        _, pc, _ = arrow()
        self._greatest = max(self._greatest, pc.max(table["written_ns"]).as_py() or 0)  # type: ignore[index]
