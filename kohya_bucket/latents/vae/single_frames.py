"""Causal 3D convolutions over one frame, as the 2D ones that they are then.

The VAE of Qwen-Image (Anima, Krea 2) came from one of videos: each convolution pads two frames of zeros before the
first. Of a single frame only the last slice of the weights meets anything but zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def fold_single_frames(model: torch.nn.Module) -> int:
    """Let a model's causal convolutions compute single frames in 2D; several frames are computed as before.

    Its weights stay what they are, and where they are. Causal convolutions are known by the `_padding` that diffusers'
    class has, and copies of it: (left, right, top, bottom, frames before, 0).

    Returns:
        how many convolutions it has of that kind.
    """
    import torch

    found = 0
    for module in model.modules():
        padding = getattr(module, "_padding", None)
        if isinstance(module, torch.nn.Conv3d) and _is_causal(module, padding):
            if not isinstance(module.forward, _Folded):
                module.forward = _Folded(module, module.forward)
            found += 1
    return found


def _is_causal(convolution: torch.nn.Conv3d, padding: Any) -> bool:
    """Whether the frames before a first one are zeros, and it is the last that the kernel sees."""
    if not (isinstance(padding, tuple) and len(padding) == 6 and convolution.padding == (0, 0, 0)):
        return False
    left, right, top, bottom, before, after = padding
    frames = convolution.kernel_size[0]
    causal = before == frames - 1 and after == 0 and convolution.dilation[0] == 1
    return bool(causal and left == right and top == bottom)


class _Folded:
    """In place of a convolution's `forward`."""

    def __init__(self, convolution: torch.nn.Conv3d, original: Any) -> None:
        self._convolution, self._original = convolution, original
        self._slice: tuple[object, torch.Tensor | None] = None, None  # what of the weights it is of, and itself

    def __call__(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        if cache_x is not None or x.ndim != 5 or x.shape[2] != 1:
            result: torch.Tensor = self._original(x, cache_x)
            return result
        own: Any = self._convolution
        left, _, top, *_ = own._padding
        flat = torch.nn.functional.conv2d(
            x[:, :, 0], self._last_slice(), own.bias, own.stride[1:], (top, left), own.dilation[1:], own.groups
        )
        return flat[:, :, None]

    def _last_slice(self) -> torch.Tensor:
        """[out, in, height, width], contiguous; made again when the weights moved or changed."""
        weight = self._convolution.weight
        state = weight.data_ptr(), weight._version, weight.dtype, weight.device
        if self._slice[0] != state or self._slice[1] is None:
            self._slice = state, weight.detach()[:, :, -1].contiguous()
        assert self._slice[1] is not None
        return self._slice[1]
