"""Overlap on a GPU: copies run beside the encoder, and the GPU itself measures time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from copy import copy
from typing import TYPE_CHECKING, Any

from kohya_bucket.latents.vae.batches import is_out_of_memory

if TYPE_CHECKING:
    import torch


class SideStream:
    """Copies tensors to a GPU while it computes; on other devices nothing overlaps."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
        """The tensor on the device, and the event after which it is valid; None: it is valid now.

        If no memory is left beside the running batch, the tensor stays where it is.
        """
        import torch

        if self._stream is None:
            return tensor.to(self._device), None
        try:
            with torch.cuda.stream(self._stream):
                return tensor.pin_memory().to(self._device, non_blocking=True), self._stream.record_event()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return tensor, None


def await_copy(tensor: torch.Tensor, copied: torch.cuda.Event | None) -> None:
    """Let all later work on the GPU wait for a tensor that was sent."""
    import torch

    if copied is not None:
        stream = torch.cuda.current_stream(tensor.device)
        stream.wait_event(copied)
        tensor.record_stream(stream)


def modes_here(device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What torch has set for this thread (its device, autocast, gradients), to be set on another as a context."""
    import torch

    if hasattr(torch, "get_autocast_dtype"):
        kinds = [kind for kind in {device.type, "cpu"} if torch.is_autocast_enabled(kind)]
        casts = [torch.autocast(kind, torch.get_autocast_dtype(kind)) for kind in kinds]
    else:  # before torch 2.4
        casts = [torch.autocast("cuda", torch.get_autocast_gpu_dtype())] if torch.is_autocast_enabled() else []
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def modes() -> AbstractContextManager[Any]:
        stack = ExitStack()
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
        for cast in casts:
            stack.enter_context(copy(cast))
        stack.enter_context(torch.inference_mode(inference))
        stack.enter_context(torch.set_grad_enabled(grad))
        return stack

    return modes


class Span:
    """The time that a device takes for the work it is given from now until `end`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began: Any = self._now()
        self._ended: Any = None

    def end(self) -> None:
        self._ended = self._now()

    def seconds(self) -> float:
        """Waits until the device has finished."""
        if self._device.type != "cuda":
            return float(self._ended - self._began)
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1000

    def _now(self) -> Any:
        """A point in time: of the clock, or of a GPU when it has finished all earlier work."""
        import torch

        if self._device.type != "cuda":
            return time.monotonic()
        return torch.cuda.current_stream(self._device).record_event(torch.cuda.Event(enable_timing=True))
