"""Reading outputs of text encoders from a store."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kohya_bucket.errors import LatentStoreError
from kohya_bucket.latents.store.latent_store import LatentStore
from kohya_bucket.latents.store.remote_shards import RemoteShards, Rows
from kohya_bucket.latents.store.shards import MOST_UNPACKED, SPANS
from kohya_bucket.latents.text.caption import KIND
from kohya_bucket.latents.text.exact_arrays import Array, Packed, unpack
from kohya_bucket.latents.text.text_writer import checksum

__all__ = ["TEXT_FOLDER", "TextStore", "open_store"]

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
                    f"the outputs of {self.table['source'][i]} in shard {self.info(i).name} are damaged (checksum); "
                    f"run `kohya-bucket cache repair {self.layout.root}` and train again, which encodes them"
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
