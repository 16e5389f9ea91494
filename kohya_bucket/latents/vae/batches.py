"""How many images go through a VAE at once: as many as fit into memory, judged by what earlier batches took."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST_TOGETHER = 8  # images that are read for one batch by default
_MOST_PIXELS = 8 << 20  # of a batch on a GPU: eight images of 1024x1024; more is hardly faster
_MOST_ON_CPU = 1 << 20  # pixels of a batch: the memory of one image of 1024x1024
_FREE_SHARE = 0.8  # of free memory that a batch may take


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the device or on the host."""
    text = str(error).lower()
    full = "out of memory" in text or "can't allocate memory" in text
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and full)


class BatchLimit:
    """How many images of a size go through a VAE at once.

    On a GPU the first image runs alone; what it and later batches take tells how many fit into free memory. A size at
    which memory ran out is not tried again.

    Args:
        device: where the VAE runs.
        fixed: always this many, instead of as many as fit.
    """

    def __init__(self, device: str | torch.device, fixed: int | None = None) -> None:
        self._device, self._fixed = str(device), fixed
        self._on_gpu = self._device.startswith("cuda")
        self._bytes_per_pixel, self._free = 0.0, 0
        self._refused_pixels = float("inf")

    def most(self, size: tuple[int, int]) -> int:
        """How many images of `size` (width, height) to encode at once, 1 or more."""
        pixels = size[0] * size[1]
        if self._fixed is not None:
            most = self._fixed
        elif not self._on_gpu:
            most = _MOST_ON_CPU // pixels
        elif not self._bytes_per_pixel:
            most = 1
        else:
            most = int(min(_MOST_PIXELS, _FREE_SHARE * self._free / self._bytes_per_pixel) // pixels)
        while most > 1 and most * pixels >= self._refused_pixels:
            most //= 2
        return max(1, most)

    def begin(self) -> None:
        """A batch begins: its memory, and what is free without it, are measured from here."""
        if self._on_gpu and self._fixed is None:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            free, _ = torch.cuda.mem_get_info(self._device)
            unused = torch.cuda.memory_reserved(self._device) - self._before  # PyTorch's own reserve
            self._free = int(free + unused)

    def went_well(self, count: int, size: tuple[int, int]) -> None:
        """A batch of `count` images of `size` was encoded."""
        if self._on_gpu and self._fixed is None:
            import torch

            nbytes = torch.cuda.max_memory_allocated(self._device) - self._before
            self._bytes_per_pixel = max(self._bytes_per_pixel, nbytes / (count * size[0] * size[1]))

    def in_parts(
        self, count: int, size: tuple[int, int], run: Callable[[slice], object], say: Callable[[str], object]
    ) -> None:
        """Call `run` for slices of `count` images of `size`, as few as memory allows; `say` hears where it ran out.

        Whatever `run` raises with a single image is raised.
        """
        at, most = 0, count
        # Halve the number of images at once whenever memory runs out, and go on from the first one that is not encoded.
        while at < count:
            part = slice(at, min(count, at + min(most, self.most(size))))
            number = part.stop - at
            self.begin()
            try:
                run(part)
            except Exception as error:
                if number == 1 or not is_out_of_memory(error):
                    raise
            else:
                self.went_well(number, size)
                at = part.stop
                continue
            # Here, where the error that kept the run's tensors is gone, memory can be freed.
            most = self.ran_out(number, size)
            say(f"out of memory at {size[0]}x{size[1]}: continuing with batches of {most}")

    def ran_out(self, count: int, size: tuple[int, int]) -> int:
        """Memory ran out with `count` images of `size`, 2 or more. Frees unused memory; returns how many to try."""
        import torch

        self._refused_pixels = min(self._refused_pixels, count * size[0] * size[1])
        gc.collect()
        torch.cuda.empty_cache()  # does nothing without a GPU
        return max(1, count // 2)
