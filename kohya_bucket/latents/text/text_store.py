"""Outputs of text encoders in a store: which caption they are of and how it was encoded, written, read, found stale.

A shard has one tensor for each array, of all its captions one after another.
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.architectures import LatentSpace
from kohya_bucket.latents.dtypes import EXACT, carrier
from kohya_bucket.latents.fingerprint import Fingerprint, Reason, Stale
from kohya_bucket.latents.remote.remote_path import Place
from kohya_bucket.latents.store.entries import StoreEntry
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.layout import Layout
from kohya_bucket.latents.store.remote_shards import RemoteShards, Rows
from kohya_bucket.latents.store.shards import ENTRIES, MOST_AXES, MOST_UNPACKED, SPANS
from kohya_bucket.latents.store.writer import Pending, StoreWriter, write_manifest
from kohya_bucket.latents.text.exact_arrays import Array, Packed, pack, unpack

__all__ = [
    "ENCODING_COLUMNS",
    "KIND",
    "TEXT_FOLDER",
    "Caption",
    "Encoding",
    "TextCache",
    "TextStore",
    "TextWriter",
    "caption_bytes",
    "check_outputs",
    "checksum",
    "open_store",
    "why_text_stale",
]

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


_OWN = {SPANS, ENTRIES, "__metadata__"}
_MOST_ARRAYS, _MOST_LETTERS = 256, 200  # so that a shard's header stays short


class _Kind(NamedTuple):
    """What the captions of one shard have in common."""

    collection: str
    layouts: tuple[tuple[str, object], ...]


@dataclass
class _Texts(Pending):
    items: list[dict[str, Packed]] = field(default_factory=list)


class TextWriter(StoreWriter):
    """Adds captions' outputs to a store; otherwise as `StoreWriter`."""

    def __enter__(self) -> TextWriter:
        return self

    def add_text(self, entry: StoreEntry, arrays: Mapping[str, Packed], *, written_ns: int | None = None) -> None:
        """Add one caption.

        Args:
            entry: see `Caption.entry`.
            arrays: its outputs by name, packed.
            written_ns: as for `add`.

        Raises:
            LatentStoreError: as `check_outputs`.
        """
        check_outputs(arrays)
        key = _Kind(entry.collection, tuple((name, packed.layout) for name, packed in sorted(arrays.items())))
        pending = self._enter(key, _Texts, entry, written_ns)
        pending.items.append(dict(sorted(arrays.items())))
        pending.nbytes += sum(packed.bits.nbytes for packed in arrays.values())
        self._commit_full(key)

    def _commit(self, common: Any, above: int) -> None:
        if not isinstance(common, _Kind):
            super()._commit(common, above)
            return
        group: _Texts = self._pending.pop(common)
        names, n = list(group.items[0]), len(group.items)
        spans = np.empty((n, len(names), 3), dtype=carrier("int64"))
        tensors: dict[str, tuple[str, Array]] = {SPANS: ("int64", spans)}
        given: dict[str, tuple[str, int]] = {}
        for at, name in enumerate(names):
            column = [item[name] for item in group.items]
            rows = np.array([len(packed.bits) for packed in column])
            spans[:, at, 0] = np.cumsum(rows) - rows
            spans[:, at, 1] = rows
            spans[:, at, 2] = [packed.length for packed in column]
            given[name] = column[0].given, column[0].axes
        # wide types first, so that each tensor begins at a multiple of its own
        for name in sorted(names, key=lambda name: -group.items[0][name].bits.itemsize):
            bits = np.concatenate([item[name].bits for item in group.items])
            tensors[name] = group.items[0][name].storage, bits
        crc = [checksum(spans[i], [item[name].bits for name in names]) for i, item in enumerate(group.items)]
        places = {"mask_row": [-2] * n, "crc_plain": crc, "crc_flipped": [0] * n, "crc_mask": [0] * n}
        space = LatentSpace(values="text", downsample_factor=1)
        path = self.layout.new_shard((0, 0), "text", self._generations.tag())
        self._write(path, group, above, places, tensors, space, {"kind": "text"}, given)


def check_outputs(arrays: Mapping[str, Packed]) -> None:
    """Refuse outputs that a store would not give again.

    Raises:
        LatentStoreError: there are none, or too many; one has the name of a part of the store, or is too large.
    """
    if not arrays or len(arrays) > _MOST_ARRAYS or _OWN & arrays.keys():
        raise LatentStoreError(
            f"outputs named {sorted(arrays)[:9]} cannot be stored: none, more than {_MOST_ARRAYS}, or a name of the "
            "store's own"
        )
    for name, packed in arrays.items():
        # each axis counts as 1 at least: see `check_shard`
        rest = math.prod(max(1, side) for side in packed.bits.shape[1:])
        widest = rest * max(8, packed.length * np.dtype(packed.given).itemsize)
        if packed.axes > MOST_AXES or widest > MOST_UNPACKED or len(name) > _MOST_LETTERS:
            raise LatentStoreError(
                f"an output {name[:_MOST_LETTERS]!r} of shape {[packed.length, *packed.bits.shape[1:]]} cannot be "
                f"stored: it has more than {MOST_AXES} axes or {MOST_UNPACKED:,} bytes, or too long a name"
            )


def checksum(spans: Array, bits: list[Array]) -> int:
    """CRC-32 of an item: how long its arrays are, then their bytes, by name. Where they lie is no part of it."""
    crc = zlib.crc32(np.ascontiguousarray(spans[:, 1:]).data)
    for array in bits:
        crc = zlib.crc32(np.ascontiguousarray(array).data, crc)
    return crc


TEXT_FOLDER = "text"  # of captions, inside the folder of a store of latents


class TextStore(LatentStore):
    """An open store whose items are captions: each has several arrays, with names, types and shapes of their own."""

    of_images = False

    def arrays(self, i: int) -> dict[str, Array]:
        """The outputs of caption `i` by name, each as the encoder's were given to the writer, as new arrays.

        Raises:
            LatentStoreError: the bytes are not those that were written.
        """
        return {name: unpack(packed) for name, packed in self.packed(i).items()}

    def packed(self, i: int) -> dict[str, Packed]:
        """The same as it lies in the file, without a copy."""
        found = self._packed(i)
        stays = isinstance(self._tensors(i)[SPANS], np.ndarray)  # or else it came just now, and will come anew
        if self.verify != "never" and not (self._checked[0, i] and self.verify == "first" and stays):
            if self._checksum(i, found) != int(self._crc[0][i]):
                raise LatentStoreError(
                    f"the outputs of {self.table['source'][i]} in shard {self.info(i).name} are damaged (checksum): "
                    f"run `kohya-bucket cache prune {self.layout.root} --damaged` and train again, which encodes them"
                )
            self._checked[0, i] = stays
        return found

    def scalars(self, i: int) -> dict[str, Array]:
        """Those of its arrays that have no axes, unchecked; a choice of the trainer's, as whether a mask is applied."""
        return {name: unpack(packed) for name, packed in self._packed(i).items() if not packed.axes}

    def names(self, i: int) -> tuple[str, ...]:
        """Names of its arrays, sorted."""
        return tuple(self.info(i).arrays)

    def expect(self, indices: Sequence[int] | npt.NDArray[Any], tensors: Sequence[Sequence[str]] | None = None) -> None:
        """As for latents: all arrays of these captions."""
        files = self._files
        if not isinstance(files, RemoteShards) or not all(self.info(int(i)).arrays for i in indices):
            super().expect(indices, tensors)
            return
        spans = [Rows(self.info(int(i)), SPANS, int(self._row[i]), int(self._row[i]) + 1) for i in indices]
        files.expect(spans)  # which say where the arrays lie
        arrays = []
        for one in spans:
            places = files.tensors(one.info)[SPANS][one.start]
            for name, (start, rows, _) in zip(one.info.arrays, places.tolist(), strict=True):
                if start >= 0 and 0 <= rows <= one.info.tensors[name].shape[0] - start:
                    arrays.append(Rows(one.info, name, start, start + rows))
        files.expect([*spans, *arrays])

    def check(self, i: int) -> str | None:
        """What is wrong with the stored bytes of caption `i`, or None. Reads all of them."""
        try:
            if not self.info(i).arrays:  # somebody put latents into the same folder
                return super().check(i)
            found = self._packed(i)
            return None if self._checksum(i, found) == int(self._crc[0][i]) else "its checksum is wrong"
        except (LatentStoreError, OSError) as error:
            return str(error)

    def _packed(self, i: int) -> dict[str, Packed]:
        info, tensors, row = self.info(i), self._tensors(i), int(self._row[i])
        if not info.arrays:
            raise LatentStoreError(f"{self.table['source'][i]} in shard {info.name} are latents, and no outputs")
        found = {}
        for (name, (given, axes)), (start, rows, length) in zip(
            info.arrays.items(), tensors[SPANS][row].tolist(), strict=True
        ):
            if not _is_span(tensors[name], start, rows, length, given, axes):
                raise LatentStoreError(f"{self.table['source'][i]}: {name} in shard {info.name} lies outside of it")
            found[name] = Packed(tensors[name][start : start + rows], info.tensors[name].dtype, given, axes, length)
        return found

    def _checksum(self, i: int, found: Mapping[str, Packed]) -> int:
        return checksum(self._tensors(i)[SPANS][int(self._row[i])], [packed.bits for packed in found.values()])


def _is_span(tensor: Array, start: int, rows: int, length: int, given: str, axes: int) -> bool:
    """Whether an array can lie there: in its tensor, and of no more rows, or bytes, than it can have."""
    inside = 0 <= start <= len(tensor) and 0 <= rows <= len(tensor) - start
    repeats = rows <= length if rows else length == 0
    nbytes = length * math.prod(tensor.shape[1:]) * np.dtype(given).itemsize
    return inside and repeats and max(length, nbytes) <= MOST_UNPACKED and (axes > 0 or length == 1)


def open_store(root: str | os.PathLike[str]) -> LatentStore:
    """The store in a folder, whatever its items are."""
    store = LatentStore(root)
    return TextStore(root) if KIND in store.table["kind"].unique().to_pylist() else store


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
