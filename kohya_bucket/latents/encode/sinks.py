"""Where encoded batches go: what `ShardSink` and `NpzSink` have in common. Both run behind the encoder, on a thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from kohya_bucket.latents.remote.remote_path import Place

if TYPE_CHECKING:
    import torch

__all__ = ["EncodedBatch", "OnDone", "Sink"]

OnDone = Callable[[Sequence[int]], None]


@dataclass
class EncodedBatch:
    """Encoded items of one batch: positions among the wanted ones, float32 latents on the CPU, masks."""

    items: list[int]
    plain: torch.Tensor
    flipped: torch.Tensor | None
    masks: list[npt.NDArray[np.uint8] | None]


class Sink(Protocol):
    """Takes batches; says through an `OnDone` which items are safe on disk.

    Attributes:
        notes: what a user should know before anything is written.
    """

    notes: list[str]

    @property
    def work(self) -> Place:
        """Folder in which the processes that write there share their work."""

    def missing(self) -> tuple[npt.NDArray[np.bool_], dict[str, int]]:
        """[N] bool: the items that are not on disk as they should be; and how many there are by reason."""

    def to_do(self, items: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Those of `items` that are not on disk as they should be, looked up anew."""

    def write(self, batch: EncodedBatch) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None:
        """Wait for what is being written, and begin nothing more: after this no thread touches the folder."""

    def finish(self) -> None:
        """Called once after all items are there, or never will be."""
