"""Causal 3D convolutions over a single frame, computed in 2D.

The VAE of Qwen-Image (Anima, Krea 2) derives from a video VAE: each convolution pads two frames of zeros before the
first. With a single frame only the last slice of the weights meets anything but zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def fold_single_frames(model: torch.nn.Module) -> int:
    """Let a model's causal convolutions compute single frames in 2D; several frames are computed as before.

    The weights are not changed or moved. Causal convolutions are recognised by the `_padding` of diffusers' class and
    its copies: (left, right, top, bottom, frames before, 0).

    Returns:
        how many such convolutions the model has.
    """
    import torch

    count = 0
    for module in model.modules():
        padding = getattr(module, "_padding", None)
        if isinstance(module, torch.nn.Conv3d) and _is_causal(module, padding):
            if not isinstance(module.forward, _Folded):
                module.forward = _Folded(module, module.forward)
            count += 1
    return count


def _is_causal(convolution: torch.nn.Conv3d, padding: Any) -> bool:
    """Whether all frames before the first are zeros, and the kernel sees no later frame."""
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
        self._slice: tuple[object, torch.Tensor | None] = None, None  # state of the weights, and their last slice

    def __call__(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        import torch

        if cache_x is not None or x.ndim != 5 or x.shape[2] != 1:
            result: torch.Tensor = self._original(x, cache_x)
            return result
        conv: Any = self._convolution
        left, _, top, *_ = conv._padding
        flat = torch.nn.functional.conv2d(
            x[:, :, 0], self._last_slice(), conv.bias, conv.stride[1:], (top, left), conv.dilation[1:], conv.groups
        )
        return flat[:, :, None]

    def _last_slice(self) -> torch.Tensor:
        """[out, in, height, width], contiguous; made again when the weights move or change."""
        weight = self._convolution.weight
        state = weight.data_ptr(), weight._version, weight.dtype, weight.device
        if self._slice[0] != state or self._slice[1] is None:
            self._slice = state, weight.detach()[:, :, -1].contiguous()
        assert self._slice[1] is not None
        return self._slice[1]
