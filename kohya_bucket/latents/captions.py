"""Captions as items of a store: what their outputs depend on, and which of them a store should hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.latents.dtypes import EXACT
from kohya_bucket.latents.fingerprint import Fingerprint
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.exact_arrays import pack
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.writer import StoreWriter

TEXT_FOLDER = "text"  # of captions, inside the folder of a store of latents


def caption_bytes(caption: str | Iterable[str]) -> bytes:
    """A caption, or several of one image, as bytes."""
    text = caption if isinstance(caption, str) else "\x1e".join(caption)
    return text.encode("utf-8", "surrogatepass")


def content_hash(content: bytes) -> str:
    """Hash of what `caption_bytes` gives."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Encoding:
    """How captions are encoded, all that their outputs depend on besides the text. "" is what nobody knows.

    Attributes:
        encoders: hash of the text encoders' weights.
        tokens: how a caption becomes tokens: the tokenizer, its lengths, what is asked of the encoders.
    """

    encoders: str = ""
    tokens: str = ""

    @property
    def columns(self) -> dict[str, str]:
        """The same as `fingerprint.differences` compares it."""
        return {"kind": "text", "vae": self.encoders, "interpolation": self.tokens}


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
        return f"caption-{content_hash(content)}"

    @property
    def text_hash(self) -> str:
        """Of the text alone."""
        return content_hash(caption_bytes(self.text))

    def entry(self, collection: str, encoding: Encoding) -> StoreEntry:
        """The item as a row of a store; columns that are about pixels are 0."""
        content, none = caption_bytes(self.text), (0, 0)
        fingerprint = Fingerprint(
            len(content), 0, self.text_hash, encoding.encoders, none, none, none, encoding.tokens, EXACT, "text"
        )
        shown = content.decode("utf-8", "surrogatepass").encode("utf-8", "backslashreplace").decode()
        return StoreEntry(self.key, fingerprint, none, (0.0, 0.0, 0.0, 0.0), shown, collection)


@dataclass(frozen=True)
class CaptionItems:
    """Captions whose outputs a store should hold, as `LatentItems` are images."""

    captions: Sequence[Caption]
    encoding: Encoding
    collection: str

    def __len__(self) -> int:
        return len(self.captions)

    @property
    def sources(self) -> list[str]:
        """Their keys."""
        return [caption.key for caption in self.captions]

    @property
    def paths(self) -> list[str]:
        """What people know them by."""
        return [str(caption.text) for caption in self.captions]

    def columns(self, items: npt.NDArray[np.int64]) -> dict[str, Any]:
        """See `LatentItems.columns`."""
        return self.encoding.columns

    def source_changes(self, stored: Mapping[str, Any], items: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """None: the key says the text."""
        return np.zeros(len(items), dtype=np.uint8)

    def with_newer_texts(self, store: LatentStore) -> None:
        """None: the key says the text."""

    def add(self, writer: StoreWriter, items: Sequence[int], outputs: Sequence[Mapping[str, Any]]) -> None:
        """Add the outputs of these captions to a store, each by name."""
        for i, arrays in zip(items, outputs, strict=True):
            packed = {name: pack(np.asarray(array)) for name, array in arrays.items()}
            writer.add_text(self.captions[i].entry(self.collection, self.encoding), packed)
