"""Captions as items of a store: their rows, how they were encoded, whether that is current, and outputs by caption."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.dtypes import EXACT
from kohya_bucket.latents.fingerprint import Fingerprint, Reason, Stale
from kohya_bucket.latents.remote.remote_path import StorePath
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.exact_arrays import Array, pack
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.writer import StoreWriter, write_manifest

__all__ = [
    "ENCODING_COLUMNS",
    "TEXT_FOLDER",
    "Caption",
    "Encoding",
    "TextCache",
    "caption_bytes",
    "why_text_stale",
]

ENCODING_COLUMNS = ("vae", "interpolation")  # of a row, where its `Encoding` is


def caption_bytes(caption: str | Iterable[str]) -> bytes:
    """A caption, or several of one image, as bytes."""
    text = caption if isinstance(caption, str) else "\x1e".join(caption)
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Encoding:
    """How captions are encoded, all that their outputs depend on besides the text. "" is what nobody knows.

    Attributes:
        encoders: hash of the text encoders' weights.
        tokens: how a caption becomes tokens: the tokenizer, its lengths, what is asked of the encoders.
    """

    encoders: str = ""
    tokens: str = ""


@dataclass(frozen=True)
class Caption:
    """One text, and how often it is left out, where a version of sd-scripts saves that with the outputs."""

    text: str | tuple[str, ...]
    dropout: float = 0.0

    @property
    def key(self) -> str:
        """The item's name: the same for each image with this caption."""
        rate = float(np.float32(self.dropout))  # as it is saved
        content = caption_bytes(self.text) + (f"\x1d{rate!r}".encode() if rate else b"")
        return "caption-" + hashlib.blake2b(content, digest_size=16).hexdigest()

    @property
    def text_hash(self) -> str:
        """Of the text alone."""
        return hashlib.blake2b(caption_bytes(self.text), digest_size=16).hexdigest()

    def entry(self, collection: str, encoding: Encoding) -> StoreEntry:
        """The item as a row of a store; columns that are about pixels are 0."""
        content = caption_bytes(self.text)
        fingerprint = Fingerprint(
            len(content), 0, self.text_hash, encoding.encoders,
            (0, 0), (0, 0), (0, 0), encoding.tokens, EXACT, "text",
        )  # fmt: skip
        shown = content.decode("utf-8", "surrogatepass").encode("utf-8", "backslashreplace").decode()
        return StoreEntry(self.key, fingerprint, (0, 0), (0.0, 0.0, 0.0, 0.0), shown, collection)


def why_text_stale(stored: Encoding, wanted: Encoding) -> list[Reason]:
    """Reasons why stored outputs of a caption do not serve; what either side does not know is no reason."""
    reasons = []
    if stored.encoders and wanted.encoders and stored.encoders != wanted.encoders:
        reasons.append(Reason(Stale.ENCODERS))
    if stored.tokens and wanted.tokens and stored.tokens != wanted.tokens:
        reasons.append(Reason(Stale.TOKENS, stored.tokens, wanted.tokens))
    return reasons


TEXT_FOLDER = "text"  # of captions, inside the folder of a store of latents


@dataclass
class TextCache:
    """Outputs by the caption's key, for one model family.

    Args:
        root: the folder of captions.
        collection: the family's name.
    """

    root: StorePath
    collection: str
    _store: LatentStore | None = field(default=None, init=False)
    _writer: StoreWriter | None = field(default=None, init=False)
    _at: dict[str, int] = field(default_factory=dict, init=False)
    _made_by: list[Encoding] | None = field(default=None, init=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_writer": None, "_made_by": None}

    def refresh(self) -> None:
        """Look at what is on disk now, what other processes wrote included."""
        if not Layout(self.root).store_file.is_file():
            self._writing()
        if self._store is None:
            self._store = LatentStore(self.root)
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

    def _writing(self) -> StoreWriter:
        if self._writer is None:
            self._writer = StoreWriter(self.root)
        return self._writer

    @property
    def opened(self) -> LatentStore:
        """The store, as it was last looked at."""
        if self._store is None:
            self.refresh()
        assert self._store is not None
        return self._store
