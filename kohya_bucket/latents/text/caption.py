"""Which caption outputs are of, how it was encoded, and why stored ones do not serve."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kohya_bucket.latents.fingerprint import Fingerprint, Reason, Stale
from kohya_bucket.latents.latent_space import EXACT
from kohya_bucket.latents.store.entries import StoreEntry

__all__ = ["ENCODING_COLUMNS", "KIND", "Caption", "Encoding", "caption_bytes", "why_text_stale"]

KIND = "text"
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
            (0, 0), (0, 0), (0, 0), encoding.tokens, EXACT, KIND,
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
