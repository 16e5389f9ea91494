"""What will be read of a store in object storage, asked for at once."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from kohya_bucket.latents.store.item_table import ItemTable
from kohya_bucket.latents.store.mapped_shards import MappedShards
from kohya_bucket.latents.store.remote_shards import RemoteShards, Rows
from kohya_bucket.latents.store.shard_info import ShardInfo

__all__ = ["ReadAhead"]

S = TypeVar("S", bound="ReadAhead")


class ReadAhead(ItemTable):
    """Items whose rows lie in shards, here or in object storage."""

    shards: dict[str, ShardInfo]
    _files: MappedShards
    _row: npt.NDArray[Any]
    _mask_row: npt.NDArray[Any]

    @abstractmethod
    def info(self, i: int) -> ShardInfo:
        """The shard item `i` lies in."""

    @property
    def is_remote(self) -> bool:
        """It lies in object storage."""
        return isinstance(self._files, RemoteShards)

    def expect(self, indices: Sequence[int] | npt.NDArray[Any], tensors: Sequence[Sequence[str]] | None = None) -> None:
        """Ask object storage at once for what will be read next; where files are mapped, there is nothing to do.

        Args:
            tensors: names of those that will be read of each item, e.g. `latents_flipped`; None: all.
        """
        if isinstance(self._files, RemoteShards):
            wanted = []
            for k, i in enumerate(indices):
                info = self.info(int(i))
                for name in info.tensors if tensors is None else tensors[k]:
                    row = int((self._mask_row if name == "alpha_mask" else self._row)[i])
                    if row >= 0 and name in info.tensors:
                        wanted.append(Rows(info, name, row, row + 1))
            self._files.expect(wanted)

    def expect_latents(
        self, indices: Sequence[int] | npt.NDArray[Any], flipped: Sequence[bool] | None, *, masks: bool = False
    ) -> None:
        """The same for latents, mirrored where `flipped` says so, and with `masks` the alpha masks."""
        if self.is_remote:
            names = [self.info(int(i)).kind + "_flipped" * bool(flipped is not None and flipped[k])
                     for k, i in enumerate(indices)]  # fmt: skip
            self.expect(indices, [[name, "alpha_mask"] if masks else [name] for name in names])

    def keep_shards(self, open_shards: int) -> None:
        """Keep each shard that is read from on this node for a while, also where the store is larger than the limit.

        That suits an order which reads the items of a shard near each other, of `open_shards` shards at a time. Where
        this node has no room for so many, one line says so.
        """
        if isinstance(self._files, RemoteShards):
            self._files.keep_open(open_shards, (info.nbytes for info in self.shards.values()))

    def without_copies(self: S) -> S:
        """The same store; of one in object storage, what lies there is read, and not what this node keeps of it."""
        if not isinstance(self._files, RemoteShards):
            return self
        out = copy.copy(self)
        out._files = self._files.without_copies()
        return out
