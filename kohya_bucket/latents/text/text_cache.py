"""Outputs of one family's captions in a store: what is there as it should be, and what is encoded again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.fingerprint import Reason, Stale
from kohya_bucket.latents.remote.remote_path import Place
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.writer import write_manifest
from kohya_bucket.latents.text.caption import ENCODING_COLUMNS, Caption, Encoding, why_text_stale
from kohya_bucket.latents.text.exact_arrays import Array, pack
from kohya_bucket.latents.text.text_store import TextStore
from kohya_bucket.latents.text.text_writer import TextWriter

__all__ = ["TextCache"]


@dataclass
class TextCache:
    """Outputs by the caption's key, for one model family.

    Args:
        root: the folder of captions.
        collection: the family's name.
    """

    root: Place
    collection: str
    _store: TextStore | None = field(default=None, init=False)
    _writer: TextWriter | None = field(default=None, init=False)
    _at: dict[str, int] = field(default_factory=dict, init=False)
    _made_by: list[Encoding] | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writer": None, "_made_by": None}

    def refresh(self) -> None:
        """Look at what is on disk now, what other processes wrote included."""
        if not Layout(self.root).store_file.is_file():
            self._writing()
        if self._store is None:
            self._store = TextStore(self.root)
        else:
            self._store.refresh()
        sources, here = self._store.strings("source"), self._store.in_collection(self.collection)
        self._made_by = None
        self._at = {sources[i]: i for i in here.tolist()}

    def __contains__(self, key: str) -> bool:
        return key in self._at

    def why_missing(self, key: str, encoding: Encoding) -> list[Reason]:
        """Why a caption must be encoded (again); none if the store has it as it should be."""
        if key not in self._at:
            return [Reason(Stale.MISSING)]
        if self._made_by is None:
            columns = [self.opened.strings(name) for name in ENCODING_COLUMNS]
            self._made_by = [Encoding(*values) for values in zip(*columns, strict=True)]
        return why_text_stale(self._made_by[self._at[key]], encoding)

    def save(self, caption: Caption, encoding: Encoding, arrays: Mapping[str, Any]) -> None:
        """Add a caption; it is on disk after `flush`."""
        packed = {name: pack(np.asarray(array)) for name, array in arrays.items()}
        self._writing().add_text(caption.entry(self.collection, encoding), packed)

    def flush(self, *, index: bool = False) -> None:
        """Commit, and see it; with `index` (one process, at the end), bring the manifest up to date."""
        if self._writer is not None:
            self._writer.flush()
        self.refresh()
        if index:
            write_manifest(self.opened)

    def load(self, key: str) -> dict[str, Array]:
        """Arrays of a caption by name, as they were given to `save`.

        Raises:
            LatentStoreError: they are not there, or damaged.
        """
        if key not in self._at:
            raise LatentStoreError(f"{self.root} has no outputs for {key} of {self.collection}: cache again")
        return self.opened.arrays(self._at[key])

    def choices(self, key: str) -> tuple[tuple[str, ...], dict[str, Array]]:
        """Names of a caption's arrays, and those without axes."""
        i = self._at[key]
        return self.opened.names(i), self.opened.scalars(i)

    def _writing(self) -> TextWriter:
        if self._writer is None:
            self._writer = TextWriter(self.root)
        return self._writer

    @property
    def opened(self) -> TextStore:
        """The store, as it was last looked at."""
        if self._store is None:
            self.refresh()
        assert self._store is not None
        return self._store
