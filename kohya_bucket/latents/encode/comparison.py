"""What a store lacks, what in it is stale and why: all items at once, on columns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.sizes import IntArray
from kohya_bucket.images.resize import IMITATED
from kohya_bucket.latents.items import LatentItems
from kohya_bucket.latents.stale import Stale
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.sources import source_changed

__all__ = ["Comparison", "bits_of", "compare"]

# one bit each; SOURCE covers length, time and content of the image file
_FACTORS = {
    Stale.SOURCE: "the image changed",
    Stale.VAE: "the VAE's weights are others",
    Stale.BUCKET: "the bucket is another",
    Stale.RESIZED: "the resized size is another",
    Stale.CROP: "the crop is another",
    Stale.INTERPOLATION: "the interpolation is another",
    Stale.DTYPE: "the dtype is another",
    Stale.KIND: "latents and posterior are not the same",
    Stale.FLIP: "the flipped latent is missing",
    Stale.MASK: "the alpha mask is missing",
}

_BITS = {factor: np.uint16(1 << bit) for bit, factor in enumerate(_FACTORS)}


@dataclass
class Comparison:
    """Wanted items against a store.

    Attributes:
        at: [N] position in the store; -1 where it is not there.
        differs: [N] uint16, one bit per entry of `_FACTORS` that differs, see `bits_of`.
    """

    at: npt.NDArray[np.int64]
    differs: npt.NDArray[np.uint16]

    @property
    def to_do(self) -> npt.NDArray[np.bool_]:
        """[N] bool: must be encoded."""
        return np.asarray((self.at < 0) | (self.differs != 0))

    def reasons(self, i: int) -> list[str]:
        """Why item `i` must be encoded; none if it is current."""
        if self.at[i] < 0:
            return [Stale.MISSING.value]
        return [text for factor, text in _FACTORS.items() if self.differs[i] & _BITS[factor]]

    def counts(self) -> dict[str, int]:
        """Number of items by reason; an item with two reasons counts in both."""
        found = {Stale.MISSING.value: int((self.at < 0).sum())}
        here = self.differs[self.at >= 0]
        found |= {text: int((here & _BITS[factor] != 0).sum()) for factor, text in _FACTORS.items()}
        return {reason: n for reason, n in found.items() if n}


def bits_of(*factors: Stale) -> int:
    """Those bits of `Comparison.differs` that stand for `factors`."""
    return sum(int(_BITS[factor]) for factor in factors)


def compare(store: LatentStore, wanted: LatentItems, *, ignoring: Collection[Stale] = ()) -> Comparison:
    """Which of the wanted items are in `store` as they should be.

    An image whose modification time changed but whose stored content hash still matches counts as current; only
    such images are read. `ignoring` names what of the encoding may differ: VAE, DTYPE, KIND.
    """
    at = store.find(wanted.sources, wanted.encoding.collection)
    here = np.flatnonzero(at >= 0)
    rows = at[here]
    differs = np.zeros(len(wanted), dtype=np.uint16)

    def note(factor: Stale, different: npt.NDArray[np.bool_]) -> None:
        differs[here[different]] |= _BITS[factor]

    def sizes_differ(prefix: tuple[str, str], want: IntArray) -> npt.NDArray[np.bool_]:
        first, second = (store.column(name)[rows] for name in prefix)
        return np.asarray((first != want[here, 0]) | (second != want[here, 1]))

    if len(here):
        encoding = wanted.encoding
        note(Stale.SOURCE, _source_changed(store, wanted, here, rows))
        note(Stale.BUCKET, sizes_differ(("bucket_width", "bucket_height"), wanted.bucket_sizes))
        note(Stale.RESIZED, sizes_differ(("resized_width", "resized_height"), wanted.resized_sizes))
        note(Stale.CROP, sizes_differ(("crop_left", "crop_top"), wanted.crops))
        note(Stale.INTERPOLATION, _words_differ(store, "interpolation", rows, wanted.interpolations()[here]))
        for factor, name in ((Stale.VAE, "vae"), (Stale.DTYPE, "dtype"), (Stale.KIND, "kind")):
            if factor not in ignoring:
                text = np.full(len(here), getattr(encoding, name), dtype=object)
                note(factor, _words_differ(store, name, rows, text))
        for factor, name, asked in ((Stale.FLIP, "flip", encoding.flip), (Stale.MASK, "mask", encoding.mask)):
            if asked:
                note(factor, ~_flags(store, name)[rows])
    return Comparison(at, differs)


def _source_changed(
    store: LatentStore, wanted: LatentItems, here: npt.NDArray[Any], rows: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    def hash_of(k: int) -> str:
        known = wanted.source_hashes
        return wanted.images.hash(int(here[k])) if known is None else known[here[k]]

    return source_changed(
        store, rows, wanted.source_bytes[here], wanted.source_mtime_ns[here], wanted.images.inside[here], hash_of,
        always=wanted.source_hashes is not None,
    )  # fmt: skip


def _words_differ(
    store: LatentStore, name: str, rows: npt.NDArray[Any], want: npt.NDArray[Any]
) -> npt.NDArray[np.bool_]:
    column = store.table[name].combine_chunks()
    codes: dict[str, int] = {}
    stored_codes = [codes.setdefault(word.removesuffix(IMITATED), len(codes)) for word in column.dictionary.to_pylist()]
    wanted_words, inverse = np.unique(want.astype(str), return_inverse=True)
    wanted_codes = np.array([codes.get(str(word).removesuffix(IMITATED), -1) for word in wanted_words])
    stored = np.array(stored_codes)[np.asarray(column.indices)[rows]]
    return np.asarray(stored != wanted_codes[inverse.reshape(-1)])


def _flags(store: LatentStore, name: str) -> npt.NDArray[np.bool_]:
    return np.asarray(store.table[name].to_numpy(zero_copy_only=False) if len(store) else [], dtype=bool)
