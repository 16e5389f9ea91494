"""The items a store should hold, images as columns and captions; which it lacks or holds stale, and why."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import FloatArray, IntArray
from kohya_bucket.errors import UnreadableError
from kohya_bucket.images.origins import Origins
from kohya_bucket.images.resize import choose_interpolation, resampler
from kohya_bucket.latents.dtypes import EXACT
from kohya_bucket.latents.fingerprint import Fingerprint, Stale, differences, source_changes
from kohya_bucket.latents.store.entries import NUMBER_COLUMNS, Columns, StoreEntry
from kohya_bucket.latents.store.exact_arrays import pack
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import absolute, relative_source
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
    """How captions are encoded, all that their outputs depend on besides the text. "" is unknown.

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
    """One text, and how often it is left out, where that is saved with the outputs."""

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
        crop_ltrb: [N, 4] float64 left, top, right, bottom of the crop, SDXL's conditioning.
        captions: N texts or None.
        source_bytes, source_mtime_ns: [N] int64, of the file or its container; -1 where it is missing.
        source_hashes: N content hashes, or None where none were asked for.
        without_bucket: (path, reason) of images that get no latent.
        further: sizes besides those at which a trainer itself would cache these images.
        dataset: number of the dataset that they belong to, in the order in which a trainer caches.
        files: N files in which their latents lie, where each has one of its own.
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
    files: list[Path] | None = None

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
    ) -> LatentItems:
        """Items of the images that have a bucket.

        Args:
            images: or their paths.
            sizes: [N, 2] size of each image file.
            content_hash: read every file to know its hash, not only its length and time.
            further: see the attributes.
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
            resized, placement.cuts[keep, :2].astype(np.int32), placement.crop_ltrb[keep],
            [None] * len(keep) if captions is None else [captions[i] for i in keep],
            nbytes, mtimes, kept.hashes() if content_hash else None, without, further,
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
        columns: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        columns |= {name: column[at] for name, column in columns.items() if isinstance(column, np.ndarray)}
        for name in ("sources", "captions", "source_hashes", "files"):
            columns[name] = columns[name] and [columns[name][i] for i in at.tolist()]
        return LatentItems(**columns | {"images": self.images.subset(at), "without_bucket": []})

    @cached_property
    def interpolations(self) -> npt.NDArray[Any]:
        """[N] text: filter and the library that computes it, "none" where the image is not resized."""
        cases = np.stack([
            (self.original_sizes == self.resized_sizes).all(axis=1),
            (self.original_sizes >= self.resized_sizes).all(axis=1),
        ], axis=1) @ np.array([2, 1])  # fmt: skip
        out = np.empty(len(self), dtype=object)
        for case in np.unique(cases):
            first = int(np.flatnonzero(cases == case)[0])
            name = "none"
            if case < 2:
                size, resized = (tuple(map(int, s[first])) for s in (self.original_sizes, self.resized_sizes))
                name = choose_interpolation((size[0], size[1]), (resized[0], resized[1]), self.encoding.interpolation)
                name = f"{name}/{resampler(name)}"
            out[cases == case] = name
        return out

    def rows(self, items: Sequence[int]) -> Columns:
        """Columns of these items for the store, see `store.entries.placed`."""
        at, encoding = np.asarray(items, dtype=np.int64), self.encoding
        words = ("collection", "vae", "dtype", "kind", "flip", "mask")
        columns: dict[str, Any] = {name: [getattr(encoding, name)] * len(at) for name in words}
        columns |= {
            "source": [self.sources[i] for i in items], "source_bytes": self.source_bytes[at],
            "source_mtime_ns": self.source_mtime_ns[at],
            "source_hash": [""] * len(at) if self.source_hashes is None else [self.source_hashes[i] for i in items],
            "interpolation": self.interpolations[at], "caption": [self.captions[i] for i in items],
        }  # fmt: skip
        for name, column in zip(NUMBER_COLUMNS, self._parts, strict=True):
            columns |= zip(NUMBER_COLUMNS[name], column[at].T, strict=True)
        return columns

    @property
    def _parts(self) -> tuple[npt.NDArray[Any], ...]:
        """In the order of `NUMBER_COLUMNS`."""
        return self.bucket_sizes, self.resized_sizes, self.original_sizes, self.crops, self.crop_ltrb

    @property
    def collection(self) -> str:
        """The part of the store that holds them."""
        return self.encoding.collection

    def columns(self, items: npt.NDArray[np.int64]) -> dict[str, Any]:
        """What these items depend on, as `fingerprint.differences` compares it."""
        found = {name: column[items] for name, column in zip(NUMBER_COLUMNS, self._parts, strict=True)}
        return vars(self.encoding) | found | {"interpolation": self.interpolations[items]}

    def source_changes(self, stored: Mapping[str, Any], items: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[M] how the images are not what was encoded, see `fingerprint.source_changes`."""

        def hash_of(k: int) -> str:
            if self.source_hashes is not None:
                return self.source_hashes[int(items[k])]
            with suppress(UnreadableError):  # the decoder says so
                return str(self.images.hash(int(items[k])))
            return ""

        now = {"source_bytes": self.source_bytes[items], "source_mtime_ns": self.source_mtime_ns[items]}
        always = self.source_hashes is not None
        return source_changes(stored, now, hash_of, inside=self.images.inside[items], always=always)

    def with_newer_texts(self, store: LatentStore) -> Any:
        """The store's rows with the captions and hashes that need no encoding; None if it has them."""
        at = store.find(self.sources, self.collection)
        here = np.flatnonzero(at >= 0)
        rows = at[here]
        found = {"caption": _other_texts(store, "caption", rows, [self.captions[i] for i in here])}
        if self.source_hashes is not None:
            same = store.column("source_bytes")[rows] == self.source_bytes[here]
            same &= store.column("source_mtime_ns")[rows] == self.source_mtime_ns[here]
            hashes = [self.source_hashes[i] for i in here[same]]
            found["source_hash"] = _other_texts(store, "source_hash", rows[same], hashes)
        return store.with_texts(**found) if any(found.values()) else None

    def entry(self, i: int) -> StoreEntry:
        """Item `i`, described for the store."""
        known = {name: tuple(column[i].tolist()) for name, column in zip(NUMBER_COLUMNS, self._parts, strict=True)}
        known |= vars(self.encoding) | {
            "source": self.sources[i], "source_bytes": int(self.source_bytes[i]), "caption": self.captions[i],
            "source_mtime_ns": int(self.source_mtime_ns[i]), "interpolation": str(self.interpolations[i]),
            "source_hash": "" if self.source_hashes is None else self.source_hashes[i],
        }  # fmt: skip
        return StoreEntry.from_values(known)


@dataclass
class Comparison:
    """Wanted items against a store.

    Attributes:
        at: [N] position in the store; -1 where it is not there.
        differs: by kind [N] bool, where an item is there and not as wanted.
    """

    at: npt.NDArray[np.int64]
    differs: dict[Stale, npt.NDArray[np.bool_]]

    @property
    def to_do(self) -> npt.NDArray[np.bool_]:
        """[N] bool: must be encoded."""
        return np.asarray(np.logical_or.reduce([self.at < 0, *self.differs.values()]))

    def counts(self) -> dict[str, int]:
        """Number of items by reason; an item with two reasons counts in both."""
        found = {Stale.MISSING: int((self.at < 0).sum())}
        found |= {kind: int(differs.sum()) for kind, differs in self.differs.items()}
        return {kind.brief: n for kind, n in found.items() if n}


Wanted = LatentItems | CaptionItems


def compare(store: LatentStore, wanted: Wanted, *, ignoring: Collection[Stale] = ()) -> Comparison:
    """Which of the wanted items are in `store` as they should be.

    An image whose modification time changed but whose stored content hash still matches counts as current; only
    such images are read. For an image that changed, size and crop are not given as reasons too. `ignoring` names what
    may differ.
    """
    at = store.find(wanted.sources, wanted.collection)
    here = np.flatnonzero(at >= 0)
    stored = store.columns(at[here])
    found = {Stale.SOURCE: wanted.source_changes(stored, here) > 0}
    found |= differences(stored, wanted.columns(here), ignoring=ignoring)
    for kind in {Stale.BUCKET, Stale.RESIZED, Stale.CROP} & found.keys():  # an edited image explains these
        found[kind] = found[kind] & ~found[Stale.SOURCE]
    differs = {kind: np.zeros(len(wanted), dtype=np.bool_) for kind in found}
    for kind, there in found.items():
        differs[kind][here] = there
    return Comparison(at, differs)


def _other_texts(
    store: LatentStore, name: str, rows: npt.NDArray[np.int64], texts: Sequence[str | None]
) -> dict[int, str | None]:
    stored = store.table[name].take(rows).to_pylist() if len(rows) else []
    return {int(row): new for row, new, old in zip(rows, texts, stored, strict=True) if new != old}
