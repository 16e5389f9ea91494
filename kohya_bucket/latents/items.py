"""The items that a store should hold, images or captions; which of them are missing or stale, and why."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.buckets.placement import Placement
from kohya_bucket.buckets.sizes import FloatArray, IntArray, as_pair
from kohya_bucket.errors import KohyaBucketError, UnreadableError
from kohya_bucket.images.origins import Origins
from kohya_bucket.images.resize import choose_interpolation, resampler
from kohya_bucket.images.stamps import hash_bytes
from kohya_bucket.latents.dtypes import EXACT
from kohya_bucket.latents.fingerprint import Fingerprint, Stale, differences, source_changes, stamps_shared
from kohya_bucket.latents.store.entries import NUMBER_COLUMNS, Columns, StoreEntry, arrow
from kohya_bucket.latents.store.exact_arrays import pack
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import absolute, relative_source
from kohya_bucket.latents.store.writer import StoreWriter
from kohya_bucket.texts import is_whole

TEXT_FOLDER = "text"  # of captions, inside the folder of a store of latents


def caption_bytes(caption: str | Iterable[str]) -> bytes:
    """A caption, or the several captions of one image, as bytes."""
    text = caption if isinstance(caption, str) else "\x1e".join(caption)
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True)
class Encoding:
    """How captions are encoded: all that outputs depend on besides the text. "" is unknown.

    Attributes:
        encoders: hash of the text encoders' weights.
        tokens: how a caption becomes tokens: the tokenizers, their lengths, the options of the encoders.
    """

    encoders: str = ""
    tokens: str = ""

    @property
    def columns(self) -> dict[str, str]:
        """The same as columns for `fingerprint.differences`."""
        return {"kind": "text", "vae": self.encoders, "interpolation": self.tokens}


@dataclass(frozen=True)
class Caption:
    """One text, and its dropout rate where a trainer's outputs record one."""

    text: str | tuple[str, ...]
    dropout: float = 0.0

    @property
    def key(self) -> str:
        """The item's name, shared by all images with this caption."""
        return f"caption-{self.text_hash}"

    @property
    def text_hash(self) -> str:
        """Of the text alone."""
        return hash_bytes(caption_bytes(self.text))

    def entry(self, collection: str, encoding: Encoding) -> StoreEntry:
        """The item as a row of a store; the columns about pixels are 0."""
        content, none = caption_bytes(self.text), (0, 0)
        fingerprint = Fingerprint(
            len(content), 0, self.text_hash, encoding.encoders, none, none, none, encoding.tokens, EXACT, "text"
        )
        shown = content.decode("utf-8", "surrogatepass").encode("utf-8", "backslashreplace").decode()
        return StoreEntry(self.key, fingerprint, none, (0.0, 0.0, 0.0, 0.0), shown, collection)


@dataclass(frozen=True)
class CaptionItems:
    """Captions whose outputs a store should hold; the counterpart of `LatentItems`."""

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
        """Their texts, as messages name them."""
        return [str(caption.text) for caption in self.captions]

    def columns(self, items: npt.NDArray[np.int64]) -> dict[str, Any]:
        """See `LatentItems.columns`."""
        return self.encoding.columns

    def source_changes(self, stored: Mapping[str, Any], items: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """None: the key is made from the text."""
        return np.zeros(len(items), dtype=np.uint8)

    def with_newer_texts(self, store: LatentStore) -> None:
        """None: the key is made from the text."""

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
        captions: N texts or None; None if they are unknown: those in the store stay.
        source_bytes, source_mtime_ns: [N] int64, of the file or its container; -1 if missing.
        source_hashes: N content hashes, "" where none was needed; None where none was at all.
        without_bucket: (path, reason) of images that get no latent.
        further: these are additional sizes, at which the trainer itself would not cache these images.
        dataset: number of their dataset, in the order in which a trainer caches.
        files: N cache files, where each item has its own.
    """

    encoding: EncodeOptions
    images: Origins
    sources: list[str]
    original_sizes: IntArray
    bucket_sizes: IntArray
    resized_sizes: IntArray
    crops: IntArray
    crop_ltrb: FloatArray
    captions: list[str | None] | None
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
            images: origins or paths.
            sizes: [N, 2] size of each image file.
            content_hash: also hash every file, which reads it; else length and time identify it, but for files that
                share both, which are hashed.
            further: see the attributes.
        """
        keep = np.flatnonzero(placement.placed).tolist()
        if not isinstance(images, Origins):
            images = Origins.named(map(absolute, images))
        kept = images.subset(keep)
        texts = [captions[i] for i in keep] if captions and any(captions) else None
        for name, text in zip(kept.names, texts or (), strict=False):
            if text is not None and not (isinstance(text, str) and is_whole(text)):
                raise KohyaBucketError(f"{name}: its caption is {text!r}, but must be a text of whole characters")
        without = [(images.names[i], placement.reason(i).text) for i in np.flatnonzero(~placement.placed).tolist()]
        nbytes, mtimes = kept.stamps()
        return cls(
            encoding=encoding,
            images=kept,
            sources=relative_source(kept.names, images_root),
            original_sizes=np.asarray(sizes)[keep].astype(np.int32),
            bucket_sizes=placement.bucket_sizes[keep],
            resized_sizes=placement.resized_sizes[keep],
            crops=placement.cuts[keep, :2].astype(np.int32),
            crop_ltrb=placement.crop_ltrb[keep],
            captions=texts,
            source_bytes=nbytes,
            source_mtime_ns=mtimes,
            source_hashes=kept.hashes() if content_hash else _hashes_of_alike(kept, nbytes, mtimes),
            without_bucket=without,
            further=further,
        )

    def __len__(self) -> int:
        return len(self.images)

    @property
    def paths(self) -> list[str]:
        """Absolute path or address of each image; for one in a container, its name."""
        return self.images.names

    def subset(self, items: Sequence[int]) -> LatentItems:
        """The items at these positions."""
        at = np.asarray(items, dtype=np.int64)
        attributes: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        attributes |= {name: column[at] for name, column in attributes.items() if isinstance(column, np.ndarray)}
        for name in ("sources", "captions", "source_hashes", "files"):
            attributes[name] = attributes[name] and [attributes[name][i] for i in at.tolist()]
        return LatentItems(**attributes | {"images": self.images.subset(at), "without_bucket": []})

    @cached_property
    def interpolations(self) -> npt.NDArray[Any]:
        """[N] text: filter and the library that computes it, "none" where the image is not resized."""
        out = np.full(len(self), "none", dtype=object)
        resized = (self.original_sizes != self.resized_sizes).any(axis=1)
        shrinks = (self.original_sizes >= self.resized_sizes).all(axis=1)
        for case in (resized & shrinks, resized & ~shrinks):  # all images of a case are resized by one filter
            for first in np.flatnonzero(case)[:1].tolist():
                sizes = as_pair(self.original_sizes[first]), as_pair(self.resized_sizes[first])
                name = choose_interpolation(*sizes, self.encoding.interpolation)
                out[case] = f"{name}/{resampler(name)}"
        return out

    def rows(self, items: Sequence[int]) -> Columns:
        """Columns of these items for the store, see `store.entries.table_of_rows`."""
        at = np.asarray(items, dtype=np.int64)
        columns: dict[str, Any] = {name: [value] * len(at) for name, value in vars(self.encoding).items()}
        columns |= {name: getattr(self, name)[at] for name in ("source_bytes", "source_mtime_ns")}
        columns["source"] = [self.sources[i] for i in items]
        columns["caption"] = [None if self.captions is None else self.captions[i] for i in items]
        columns["source_hash"] = [self.source_hashes[i] if self.source_hashes else "" for i in items]
        columns["interpolation"] = self.interpolations[at]
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
        """What these items depend on, as columns for `fingerprint.differences`."""
        geometry = {name: column[items] for name, column in zip(NUMBER_COLUMNS, self._parts, strict=True)}
        return vars(self.encoding) | geometry | {"interpolation": self.interpolations[items]}

    def source_changes(self, stored: Mapping[str, Any], items: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """[M] how the images differ from those that were encoded, see `fingerprint.source_changes`."""

        def hash_of(k: int) -> str:
            if self.source_hashes and (known := self.source_hashes[int(items[k])]):
                return known
            with suppress(UnreadableError):  # the decoder will say so
                return str(self.images.hash(int(items[k])))
            return ""

        files = {"source_bytes": self.source_bytes[items], "source_mtime_ns": self.source_mtime_ns[items]}
        always = np.array([bool(self.source_hashes[i]) for i in items], np.bool_) if self.source_hashes else False
        return source_changes(stored, files, hash_of, inside=self.images.inside[items], always=always)

    def with_captions_of(self, store: LatentStore) -> LatentItems:
        """The same with the captions that a store has, where they are unknown here."""
        if self.captions is not None:
            return self
        pa, _, _ = arrow()
        rows = store.find(self.sources, self.collection)
        captions = store.table["caption"].take(pa.array(rows, mask=rows < 0)).to_pylist()
        return replace(self, captions=captions)

    def with_newer_texts(self, store: LatentStore) -> Any:
        """The store's rows with changed captions and new hashes, which need no encoding; None if nothing changed."""
        at = store.find(self.sources, self.collection)
        stored = np.flatnonzero(at >= 0)
        rows = at[stored]
        newer = {}
        if self.captions is not None:
            newer["caption"] = _changed_texts(store, "caption", rows, [self.captions[i] for i in stored])
        if self.source_hashes is not None:  # "" where a file could not be read: the stored hash stays
            same = np.array([bool(self.source_hashes[i]) for i in stored], dtype=np.bool_)
            same &= store.column("source_bytes")[rows] == self.source_bytes[stored]
            same &= store.column("source_mtime_ns")[rows] == self.source_mtime_ns[stored]
            hashes = [self.source_hashes[i] for i in stored[same]]
            newer["source_hash"] = _changed_texts(store, "source_hash", rows[same], hashes)
        return store.with_texts(**newer) if any(newer.values()) else None

    def entry(self, i: int) -> StoreEntry:
        """Item `i`, described for the store."""
        values: dict[str, Any] = vars(self.encoding) | {
            "source": self.sources[i],
            "caption": None if self.captions is None else self.captions[i],
        }
        values |= {name: tuple(column[i].tolist()) for name, column in zip(NUMBER_COLUMNS, self._parts, strict=True)}
        values |= {name: int(getattr(self, name)[i]) for name in ("source_bytes", "source_mtime_ns")}
        values["source_hash"] = self.source_hashes[i] if self.source_hashes else ""
        return StoreEntry.from_values(values | {"interpolation": str(self.interpolations[i])})


def _hashes_of_alike(images: Origins, nbytes: npt.NDArray[np.int64], mtimes: npt.NDArray[np.int64]) -> list[str] | None:
    """Hashes of the files that could change places unseen, and "" of all others; None if there are no such files."""
    alike = np.flatnonzero(stamps_shared(nbytes, mtimes) & ~images.inside)
    hashes = dict(zip(alike.tolist(), images.subset(alike).hashes(), strict=True))
    return [hashes.get(i, "") for i in range(len(images))] if hashes else None


@dataclass
class Comparison:
    """Wanted items against a store.

    Attributes:
        at: [N] position in the store; -1 where it is missing.
        differs: by kind [N] bool, where a stored item is stale.
    """

    at: npt.NDArray[np.int64]
    differs: dict[Stale, npt.NDArray[np.bool_]]

    @property
    def to_do(self) -> npt.NDArray[np.bool_]:
        """[N] bool: must be encoded."""
        return np.asarray(np.logical_or.reduce([self.at < 0, *self.differs.values()]))

    def counts(self) -> dict[str, int]:
        """Number of items by reason; an item with two reasons counts in both."""
        counts = {Stale.MISSING: int((self.at < 0).sum())}
        counts |= {kind: int(differs.sum()) for kind, differs in self.differs.items()}
        return {kind.brief: n for kind, n in counts.items() if n}


Wanted = LatentItems | CaptionItems


def compare(store: LatentStore, wanted: Wanted, *, ignoring: Collection[Stale] = ()) -> Comparison:
    """Which of the wanted items are in `store` as they should be.

    An image whose modification time changed but whose stored content hash still matches is current; only such images
    are read. A changed image has that one reason, and not its size and crop too. `ignoring` names what may differ.
    """
    at = store.find(wanted.sources, wanted.collection)
    present = np.flatnonzero(at >= 0)
    stored = store.columns(at[present])
    reasons = {Stale.SOURCE: wanted.source_changes(stored, present) > 0}
    reasons |= differences(stored, wanted.columns(present), ignoring=ignoring)
    for kind in {Stale.BUCKET, Stale.RESIZED, Stale.CROP} & reasons.keys():  # an edited image explains these
        reasons[kind] = reasons[kind] & ~reasons[Stale.SOURCE]
    differs = {kind: np.zeros(len(wanted), dtype=np.bool_) for kind in reasons}
    for kind, stale in reasons.items():
        differs[kind][present] = stale
    return Comparison(at, differs)


def _changed_texts(
    store: LatentStore, name: str, rows: npt.NDArray[np.int64], texts: Sequence[str | None]
) -> dict[int, str | None]:
    stored = store.table[name].take(rows).to_pylist() if len(rows) else []
    return {int(row): new for row, new, old in zip(rows, texts, stored, strict=True) if new != old}
