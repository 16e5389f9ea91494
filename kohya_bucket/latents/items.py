"""The items a store should hold, as columns; which of them it lacks or holds stale, and why."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import FloatArray, IntArray, as_pair
from kohya_bucket.images.origins import Origins
from kohya_bucket.images.resize import IMITATED, choose_interpolation, resampler
from kohya_bucket.latents.fingerprint import Fingerprint, Stale
from kohya_bucket.latents.store.entries import SIDES, StoreEntry, arrow, row_schema
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import absolute, relative_source
from kohya_bucket.latents.store.state import source_changed

__all__ = ["Comparison", "EncodeOptions", "LatentItems", "bits_of", "compare"]


@dataclass(frozen=True)
class EncodeOptions:
    """How items are encoded, apart from their geometry.

    Attributes:
        vae: hash of the VAE's weights.
        dtype: storage type by name.
        kind: "latents" or "posterior".
        flip, mask: also store the mirrored image, the alpha channel.
        interpolation: filter of the resize, one of `images.resize.INTERPOLATIONS`.
        collection: part of the store, see `StoreEntry`.
    """

    vae: str
    dtype: str = "bfloat16"
    kind: str = "latents"
    flip: bool = False
    mask: bool = False
    interpolation: str = "auto"
    collection: str = ""


@dataclass
class LatentItems:
    """N items in order. All sizes are (width, height) in pixels.

    Attributes:
        images: where they are, with absolute paths.
        sources: their names, as the store has them.
        original_sizes, bucket_sizes, resized_sizes, crops: [N, 2] int32.
        crop_ltrb: [N, 4] float64, sd-scripts' conditioning box.
        captions: N texts or None.
        source_bytes, source_mtime_ns: [N] int64, of the file or its container; -1 where it is missing.
        source_hashes: N content hashes, or None where none were asked for.
        without_bucket: (path, reason) of images that get no latent.
        further: sizes besides the one at which sd-scripts caches these images; their npz are named for it.
        dataset: number of the dataset that they belong to, in the order in which sd-scripts caches.
    """

    encoding: EncodeOptions
    images: Origins
    sources: list[str]
    original_sizes: IntArray
    bucket_sizes: IntArray
    resized_sizes: IntArray
    crops: IntArray
    crop_ltrb: FloatArray
    captions: list[str | None]
    source_bytes: npt.NDArray[np.int64]
    source_mtime_ns: npt.NDArray[np.int64]
    source_hashes: list[str] | None = None
    without_bucket: list[tuple[str, str]] = field(default_factory=list)
    further: bool = False
    dataset: int = 0

    @classmethod
    def from_placement(
        cls,
        images: Origins | Sequence[str | os.PathLike[str]],
        sizes: IntArray,
        placement: Placement,
        encoding: EncodeOptions,
        images_root: Path,
        *,
        captions: Sequence[str | None] | None = None,
        content_hash: bool = False,
        further: bool = False,
        dataset: int = 0,
    ) -> LatentItems:
        """Items of the images that have a bucket.

        Args:
            images: or their paths.
            sizes: [N, 2] size of each image file.
            content_hash: read every file to know its hash, not only its length and time.
            further, dataset: see the attributes.
        """
        keep = np.flatnonzero(placement.placed).tolist()
        if not isinstance(images, Origins):
            images = Origins.named(map(absolute, images))
        kept = images.subset(keep)
        resized, buckets = placement.resized_sizes[keep], placement.bucket_sizes[keep]
        without = [(images.names[i], placement.reason(i).text) for i in np.flatnonzero(~placement.placed).tolist()]
        nbytes, mtimes = kept.stamps()
        return cls(
            encoding, kept, relative_source(kept.names, images_root), np.asarray(sizes)[keep].astype(np.int32), buckets,
            resized, ((resized - buckets) // 2).astype(np.int32), placement.crop_ltrb[keep],
            [None] * len(keep) if captions is None else [captions[i] for i in keep],
            nbytes, mtimes, kept.hashes() if content_hash else None, without,
            further, dataset,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.images)

    @property
    def paths(self) -> list[str]:
        """Absolute path or address of each image; of one in a container, its name."""
        return self.images.names

    def subset(self, items: Sequence[int]) -> LatentItems:
        """The items at these positions."""
        at = np.asarray(items, dtype=np.int64)
        hashes = None if self.source_hashes is None else [self.source_hashes[i] for i in at.tolist()]
        return LatentItems(
            self.encoding, self.images.subset(at), [self.sources[i] for i in at.tolist()],
            self.original_sizes[at], self.bucket_sizes[at], self.resized_sizes[at], self.crops[at],
            self.crop_ltrb[at], [self.captions[i] for i in at.tolist()], self.source_bytes[at],
            self.source_mtime_ns[at], hashes, further=self.further, dataset=self.dataset,
        )  # fmt: skip

    @cached_property
    def interpolations(self) -> npt.NDArray[Any]:
        """[N] text: filter and the library that computes it, "none" where the image is not resized."""
        cases = np.stack([
            (self.original_sizes == self.resized_sizes).all(axis=1),
            (self.original_sizes >= self.resized_sizes).all(axis=1),
            (self.original_sizes > self.resized_sizes).all(axis=1),
        ], axis=1) @ np.array([4, 2, 1])  # fmt: skip
        out = np.empty(len(self), dtype=object)
        for case in np.unique(cases):
            first = int(np.flatnonzero(cases == case)[0])
            name = "none"
            if case < 4:
                size, resized = (tuple(map(int, s[first])) for s in (self.original_sizes, self.resized_sizes))
                name = choose_interpolation((size[0], size[1]), (resized[0], resized[1]), self.encoding.interpolation)
                name = f"{name}/{resampler(name, shrinks=bool(case & 2))}"
            out[cases == case] = name
        return out

    def rows(self, items: Sequence[int]) -> Any:
        """Arrow table of these items for the store, see `row_schema`."""
        pa, _, _ = arrow()
        at, encoding = np.asarray(items, dtype=np.int64), self.encoding
        same = vars(encoding)
        columns: dict[str, Any] = {
            "source": [self.sources[i] for i in items], "source_bytes": self.source_bytes[at],
            "source_mtime_ns": self.source_mtime_ns[at],
            "source_hash": [""] * len(at) if self.source_hashes is None else [self.source_hashes[i] for i in items],
            "interpolation": self.interpolations[at], "caption": [self.captions[i] for i in items],
            "crop_left": self.crops[at, 0], "crop_top": self.crops[at, 1],
        }  # fmt: skip
        for name in ("bucket", "resized", "original"):
            sizes = getattr(self, f"{name}_sizes")[at]
            columns |= {f"{name}_width": sizes[:, 0], f"{name}_height": sizes[:, 1]}
        columns |= {f"ltrb_{side}": self.crop_ltrb[at, k] for k, side in enumerate(SIDES)}
        return pa.table([
            pa.array(columns[f.name] if f.name in columns else [same[f.name]] * len(at), f.type) for f in row_schema()
        ], schema=row_schema())  # fmt: skip

    def entry(self, i: int) -> StoreEntry:
        """Item `i`, described for the store."""
        encoding = self.encoding
        fingerprint = Fingerprint(
            int(self.source_bytes[i]), int(self.source_mtime_ns[i]),
            "" if self.source_hashes is None else self.source_hashes[i], encoding.vae,
            as_pair(self.bucket_sizes[i]), as_pair(self.resized_sizes[i]), as_pair(self.crops[i]),
            str(self.interpolations[i]), encoding.dtype, encoding.kind, encoding.flip, encoding.mask,
        )  # fmt: skip
        left, top, right, bottom = (float(side) for side in self.crop_ltrb[i])
        original = as_pair(self.original_sizes[i])
        return StoreEntry(
            self.sources[i], fingerprint, original, (left, top, right, bottom), self.captions[i], encoding.collection
        )


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
        note(Stale.INTERPOLATION, _words_differ(store, "interpolation", rows, wanted.interpolations[here]))
        for factor, name in ((Stale.VAE, "vae"), (Stale.DTYPE, "dtype"), (Stale.KIND, "kind")):
            if factor not in ignoring:
                text = np.full(len(here), getattr(encoding, name), dtype=object)
                note(factor, _words_differ(store, name, rows, text))
        for factor, name, asked in ((Stale.FLIP, "flip", encoding.flip), (Stale.MASK, "mask", encoding.mask)):
            if asked:
                note(factor, ~store.column(name)[rows])
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
    words, stored = store.words(name)
    codes: dict[str, int] = {}
    stored_codes = [codes.setdefault(word.removesuffix(IMITATED), len(codes)) for word in words]
    wanted_words, inverse = np.unique(want.astype(str), return_inverse=True)
    wanted_codes = np.array([codes.get(str(word).removesuffix(IMITATED), -1) for word in wanted_words])
    return np.asarray(np.array(stored_codes)[stored[rows]] != wanted_codes[inverse.reshape(-1)])
