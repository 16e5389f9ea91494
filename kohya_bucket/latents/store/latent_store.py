"""Reading a store: its items, and their latents at memory speed."""

from __future__ import annotations

import copy
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kohya_bucket.checks import path_meant
from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.fingerprint import Stale, StaleReason
from kohya_bucket.latents.finite import all_finite
from kohya_bucket.latents.store.contents import Contents, contents_of
from kohya_bucket.latents.store.entries import OPAQUE, WITHOUT_MASKS, ItemTable
from kohya_bucket.latents.store.exact_arrays import DamagedItemError, Packed, checksum, split, unpack
from kohya_bucket.latents.store.layout import Layout, remedy
from kohya_bucket.latents.store.remote_shards import RemoteShards, RowRange, shard_files
from kohya_bucket.latents.store.shards import SPANS, ShardInfo
from kohya_bucket.latents.store.storage import RemotePath, is_there
from kohya_bucket.texts import counted, one_line, some

_log = logging.getLogger(__name__)
_PLAIN, _FLIPPED, _MASK = 0, 1, 2
_Read = TypeVar("_Read")


class LatentStore(ItemTable):
    """An open store of latents, or of text-encoder outputs.

    Safe to share with worker processes; each maps the shards that it reads.

    Args:
        root: the store's folder, or its address in object storage ("s3://bucket/latents").
        verify: "first" checks an item when this process first reads it, by its checksum and for NaN and infinity (the
            default), "always" at every read, "never" not at all.

    Attributes:
        shards: the usable shards, by name.
        damage: (file name, problem) of every unusable shard or manifest.
        indexed: the manifest is complete; unindexed: shards that it does not name yet.
        away, away_rows, given_up: see `Contents`.

    Raises:
        LatentStoreError: there is no store, or pyarrow is missing.
        UnreadableError: one of its files cannot be read now.
    """

    def __init__(self, root: str | os.PathLike[str], *, verify: str = "first") -> None:
        if verify not in ("first", "always", "never"):
            raise LatentStoreError(f"verify={verify!r}: use 'first', 'always' or 'never'")
        self.layout = Layout(root)
        self.verify = verify
        if not self.layout.exists():
            far, meant = "", ""
            if isinstance(self.layout.root, RemotePath):
                far = " (or there is no such bucket)"
            elif not is_there(self.layout.root):
                meant = f", or {path_meant(root)}"
            raise LatentStoreError(
                f"{self.layout.root} is not a latent store{far}: make one with `kohya-bucket precompute … --output "
                f"{root}`{meant}"
            )
        self._show(contents_of(self.layout, {}))
        if self.damage:
            problems = one_line(some([f"{name}: {problem}" for name, problem in self.damage], 1))
            files, root = counted(len(self.damage), "file"), self.layout.root
            _log.warning("%s: %s cannot be used: %s: %s", root, files, problems, remedy(root))

    def _show(self, contents: Contents) -> None:
        super().__init__(contents.table.combine_chunks())
        self.shards, self.damage, self.indexed = contents.shards, contents.damage, contents.indexed
        self.away, self.away_rows, self.given_up = contents.away, contents.away_rows, contents.given_up
        self.unindexed = contents.shards.keys() - contents.named
        names, self._shard = self.words("shard")
        self._infos = [self.shards.get(name) for name in names]
        self._row, self._mask_row = self.column("row"), self.column("mask_row")
        self._crc = [self.column(name) for name in ("crc_plain", "crc_flipped", "crc_mask")]
        self._files = shard_files(self.layout.shards, self.shards)

    def refresh(self, without: Iterable[str] = ()) -> None:
        """Look at the folder again, while other processes may add to it, pack or prune it; `without` these shards."""
        self._show(contents_of(self.layout, self.shards, set(without)))

    def release(self) -> None:
        """Unmap all files, so that they can be removed on Windows too."""
        self._files.release()

    def replaced_rows(self) -> int:
        """How many rows of usable shards newer ones have replaced."""
        return sum(info.rows for info in self.shards.values()) - len(self)

    def info(self, i: int) -> ShardInfo:
        """The shard that holds item `i`."""
        info: ShardInfo | None = self._infos[self._shard[i]]
        if info is None:
            raise LatentStoreError(f"item {i} lies in a shard that is gone")
        return info

    @property
    def of_images(self) -> bool:
        """Each item is made from a file; those of a store of captions are not."""
        return not any(info.arrays for info in self.shards.values())

    @property
    def is_remote(self) -> bool:
        """It lies in object storage."""
        return isinstance(self._files, RemoteShards)

    def expect(self, indices: Sequence[int] | npt.NDArray[Any], tensors: Sequence[Sequence[str]] | None = None) -> None:
        """Request from object storage, all at once, what will be read next; mapped files need nothing.

        Args:
            tensors: names of the tensors that will be read, for each item, e.g. `latents_flipped`; None: all.
        """
        if isinstance(self._files, RemoteShards):
            wanted, spans = [], []
            for k, i in enumerate(indices):
                info = self.info(int(i))
                if info.arrays:
                    row = int(self._row[i])
                    spans.append(RowRange(info, SPANS, row, row + 1))
                    continue
                for name in info.tensors if tensors is None else tensors[k]:
                    row = int((self._mask_row if name == "alpha_mask" else self._row)[i])
                    if row >= 0 and name in info.tensors:
                        wanted.append(RowRange(info, name, row, row + 1))
            # The spans of a caption say where its arrays are, so they are needed first.
            self._files.expect(spans)
            for span in spans:
                places = self._files.tensors(span.info)[SPANS][span.start]
                for name, (start, rows, _) in zip(span.info.arrays, places.tolist(), strict=True):
                    if start >= 0 and 0 <= rows <= span.info.tensors[name].shape[0] - start:
                        wanted.append(RowRange(span.info, name, start, start + rows))
            self._files.expect([*spans, *wanted])

    def expect_latents(
        self, indices: Sequence[int] | npt.NDArray[Any], flipped: Sequence[bool] | None, *, masks: bool = False
    ) -> None:
        """`expect` for latents, mirrored where `flipped` says so, and with `masks` the alpha masks."""
        if self.is_remote:
            names = [self.info(int(i)).kind for i in indices]
            names = [f"{name}_flipped" if flipped is not None and flipped[k] else name for k, name in enumerate(names)]
            self.expect(indices, [[name, "alpha_mask"] if masks else [name] for name in names])

    def keep_shards(self, open_shards: int) -> None:
        """Keep a copy of each shard that is read on this node, even where the store exceeds the cache.

        This suits an order that reads items of at most `open_shards` shards at a time. If the node has no room for so
        many, one line says so.
        """
        if isinstance(self._files, RemoteShards):
            self._files.keep_open(open_shards, (info.nbytes for info in self.shards.values()))

    def without_copies(self) -> LatentStore:
        """The same store, which for object storage ignores the copies on this node."""
        if not isinstance(self._files, RemoteShards):
            return self
        out = copy.copy(self)
        out._files = self._files.without_copies()
        return out

    def read(self, i: int, *, flipped: bool = False) -> npt.NDArray[Any]:
        """Item `i` as stored, in its carrier type, without a copy.

        [C, h, w] latents, or [2, C, h, w] mean and standard deviation.

        Raises:
            LatentStoreError: there is no flipped latent, the bytes are damaged, or they are text-encoder outputs.
        """
        info = self.info(i)
        if info.arrays:
            raise LatentStoreError(f"{self.layout.root} holds text-encoder outputs, not latents")
        name = info.kind + ("_flipped" if flipped else "")
        if name not in info.tensors:
            raise LatentStoreError(
                f"{self.table['source'][i]} has no flipped latent: run `kohya-bucket precompute` again with --flip"
            )
        return self._bits(i, name, int(self._row[i]))

    def read_mask(self, i: int) -> npt.NDArray[np.uint8] | None:
        """Alpha channel of item `i`, [H, W] uint8 in pixels of the bucket; None if the image is opaque.

        Raises:
            LatentStoreError: masks were not stored.
        """
        row = int(self._mask_row[i])
        if row == OPAQUE:
            return None
        if row == WITHOUT_MASKS:
            raise LatentStoreError(
                f"{self.table['source'][i]} has no alpha mask: run `kohya-bucket precompute` again with --mask"
            )
        return self._bits(i, "alpha_mask", row)

    def gather(
        self, indices: Sequence[int] | npt.NDArray[Any], flipped: Sequence[bool] | None = None
    ) -> npt.NDArray[Any]:
        """Items of one bucket as one new array [B, C, h, w] (or [B, 2, C, h, w]) in their carrier type.

        Raises:
            LatentStoreError: the items differ in shape or type; or see `read`.
        """
        self.expect_latents(indices, flipped)
        rows = [self.read(int(i), flipped=flipped is not None and bool(flipped[k])) for k, i in enumerate(indices)]
        first = rows[0]
        if any(row.shape != first.shape or row.dtype != first.dtype for row in rows):
            raise LatentStoreError(f"items of different shapes in one batch: {sorted({r.shape for r in rows})}")
        return np.stack(rows)

    def arrays(self, i: int) -> dict[str, npt.NDArray[Any]]:
        """The outputs of caption `i` by name, equal to those that were written, as new arrays.

        Raises:
            LatentStoreError: the bytes are damaged, or are latents.
        """
        return {name: unpack(packed) for name, packed in self.packed(i).items()}

    def packed(self, i: int, *, always: bool = False) -> dict[str, Packed]:
        """The same, packed as in the file, without a copy; `always` compares the checksum, whatever `verify` says."""
        info = self.info(i)
        if not info.arrays:
            raise LatentStoreError(f"{self.table['source'][i]} in shard {info.name} is a latent, not a text's outputs")
        row, storage = int(self._row[i]), {name: info.tensors[name].dtype for name in info.arrays}

        def read() -> dict[str, Packed]:
            tensors = self._files.tensors(info)
            outputs = split(tensors, row, storage, info.arrays)
            if always or self._unchecked(info, tensors[SPANS], SPANS, row):
                if checksum(tensors[SPANS][row], [one.bits for one in outputs.values()]) != int(self._crc[0][i]):
                    raise DamagedItemError("its checksum is wrong")
                for name, output in outputs.items():
                    _refuse_not_finite(name, output.bits)
                self._files.checked(info, SPANS)[row] = True
            return outputs

        return self._attempts(i, read)

    def _bits(self, i: int, name: str, row: int, *, always: bool = False) -> npt.NDArray[Any]:
        info = self.info(i)
        array = self._files.tensors(info)[name]
        if not (always or self._unchecked(info, array, name, row)):  # usual, and fast
            bits: npt.NDArray[Any] = array[row]
            return bits

        def read() -> npt.NDArray[Any]:
            bits: npt.NDArray[Any] = self._files.tensors(info)[name][row]
            if zlib.crc32(bits.data) != int(self._crc[_role(name)][i]):
                raise DamagedItemError(f"checksum of {name} is wrong")
            _refuse_not_finite(name, bits)
            self._files.checked(info, name)[row] = True
            return bits

        return self._attempts(i, read)

    def _attempts(self, i: int, read: Callable[[], _Read]) -> _Read:
        """The result of `read`. Bytes in object storage are read twice more before they count as damaged: the first may
        come from this node's copy, which is given up, and a bit may change on the way."""
        for last in (False, False, True):
            try:
                return read()
            except DamagedItemError as error:
                info = self.info(i)
                if last or not self._files.forget(info):
                    item = f"{self.table['source'][i]} in shard {info.name}"
                    raise LatentStoreError(f"{item} is damaged ({error}): {remedy(self.layout.root)}") from error
        raise AssertionError

    def check(self, i: int) -> str | None:
        """What is wrong with the stored bytes of item `i`, or None. Reads all of them; raises `UnreadableError` or
        `StorageError` where they cannot be read now."""
        try:
            if self.info(i).arrays:
                self.packed(i, always=True)
                return None
            for name in self._files.tensors(self.info(i)):
                row = int(self._mask_row[i] if _role(name) == _MASK else self._row[i])
                if row >= 0:
                    self._bits(i, name, row, always=True)
        except LatentStoreError as error:
            return str(error.__cause__ if isinstance(error.__cause__, DamagedItemError) else error)
        return None

    def _unchecked(self, info: ShardInfo, array: Any, name: str, row: int) -> bool:
        """Whether a row's checksum must be compared; what came by a request is new each time."""
        if self.verify != "first" or not isinstance(array, np.ndarray):
            return self.verify != "never"
        return not self._files.checked(info, name)[row]


def _refuse_not_finite(name: str, bits: npt.NDArray[Any]) -> None:
    if not all_finite(bits):
        raise DamagedItemError(str(StaleReason(Stale.NOT_FINITE, name)))


def _role(tensor: str) -> int:
    return _MASK if tensor == "alpha_mask" else _FLIPPED if tensor.endswith("_flipped") else _PLAIN
