"""How many images go through a VAE at once: as many as memory has room for, by what batches were seen to take."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST_TOGETHER = 8  # images that are read for one batch, where no number is asked for
_MOST_PIXELS = 8 << 20  # of a batch on a GPU: eight images of 1024x1024; more is hardly faster
_MOST_ON_PROCESSOR = 1 << 20  # no more memory than one image of 1024x1024 takes
_ROOM = 0.8  # the share of free memory that a batch may take


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, on the device or beside it."""
    text = str(error).lower()
    full = "out of memory" in text or "can't allocate memory" in text
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and full)


class BatchLimit:
    """How many images of a size go through a VAE at once.

    On a GPU the first image runs alone; from what it takes, and larger batches after it, follows how many fit into what
    is free. A size at which memory ran out is not tried again.

    Args:
        device: where the VAE runs.
        given: a number that is asked for, in place of one that follows from memory.
    """

    def __init__(self, device: str | torch.device, given: int | None = None) -> None:
        self._device, self._given = str(device), given
        self._on_gpu = self._device.startswith("cuda")
        self._bytes_per_pixel, self._free = 0.0, 0
        self._refused_pixels = float("inf")

    def most(self, size: tuple[int, int]) -> int:
        """How many images of `size` (width, height) to encode at once, 1 or more."""
        pixels = size[0] * size[1]
        if self._given is not None:
            most = self._given
        elif not self._on_gpu:
            most = _MOST_ON_PROCESSOR // pixels
        elif not self._bytes_per_pixel:
            most = 1
        else:
            most = int(min(_MOST_PIXELS, _ROOM * self._free / self._bytes_per_pixel) // pixels)
        while most > 1 and most * pixels >= self._refused_pixels:
            most //= 2
        return max(1, most)

    def begin(self) -> None:
        """A batch begins: what it takes, and what is free without it, is measured from here."""
        if self._on_gpu and self._given is None:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            free, _ = torch.cuda.mem_get_info(self._device)
            unused = torch.cuda.memory_reserved(self._device) - self._before  # held by PyTorch
            self._free = int(free + unused)

    def went_well(self, count: int, size: tuple[int, int]) -> None:
        """A batch of `count` images of `size` was encoded."""
        if self._on_gpu and self._given is None:
            import torch

            taken = torch.cuda.max_memory_allocated(self._device) - self._before
            self._bytes_per_pixel = max(self._bytes_per_pixel, taken / (count * size[0] * size[1]))

    def ran_out(self, count: int, size: tuple[int, int]) -> int:
        """Memory ran out with `count` images of `size`, 2 or more: what is held for nothing is given back.

        Returns how many to try next.
        """
        import torch

        self._refused_pixels = min(self._refused_pixels, count * size[0] * size[1])
        gc.collect()
        torch.cuda.empty_cache()  # nothing, where nothing runs on a GPU
        return max(1, count // 2)
