"""One block of a transformer of a model's width, to time what tokens cost on the device at hand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.token_grids import TokenGrid
from kohya_bucket.planning.costs import CostFit, fit_cost, measure_cost

_HEAD = 128


class _Block(nn.Module):
    """Attention and a feed-forward part of four times the width, each behind a norm and beside a short cut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        heads = self.qkv(self.first(x)).view(n, length, 3, width // _HEAD, _HEAD).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(*heads.unbind())
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        done: torch.Tensor = x + self.down(gelu(self.up(self.second(x))))
        return done


def measure_model(
    grid: TokenGrid,
    tokens: Sequence[int],
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    progress: Callable[[int, int], object] | None = None,
    expect: Callable[[float], object] | None = None,
) -> CostFit:
    """Seconds of all blocks of a model for one image of each number of tokens: those of one block times their number.

    As many images are timed together as make the tokens of the longest: of a short one alone, a GPU's time is that of
    starting kernels (on an H200, 1,024 tokens took half as long as 4,096), which no line in its tokens meets.

    Args:
        progress: called as `progress(done, total)`.
        expect: called before, with the seconds that all of it will take, estimated from the smallest shape.

    Raises:
        KohyaBucketError: a number of tokens that does not fit into the device's memory.
    """
    block = _Block(grid.width).to(device, dtype)
    images = np.maximum(1, max(tokens) // np.array(tokens))

    def step(k: int) -> None:
        try:
            x = torch.randn(int(images[k]), tokens[k], grid.width, device=device, dtype=dtype, requires_grad=True)
            block(x).square().mean().backward()
        except torch.OutOfMemoryError as error:
            why = str(error).splitlines()[0]
            raise KohyaBucketError(
                f"{tokens[k]:,} tokens do not fit into the memory of {device} ({why}): leave such sizes out"
            ) from None
        block.zero_grad(set_to_none=True)

    waits = {"cuda": torch.cuda.synchronize, "mps": torch.mps.synchronize, "xpu": torch.xpu.synchronize}
    wait = waits.get(device.type, lambda: None)
    if expect is not None:
        least = min(range(len(tokens)), key=tokens.__getitem__)
        for _ in range(2):  # the first one starts the device
            wait()
            began = time.perf_counter()
            step(least)
            wait()
        seconds = time.perf_counter() - began
        # of matrices and of attention, in the same unit
        work = [n * (24 * grid.width * length + 4 * length * length) for n, length in zip(images, tokens, strict=True)]
        expect(seconds * sum(work) / work[least] * (rounds + 1))
    one = measure_cost(step, tokens, rounds=rounds, synchronize=wait, progress=progress)
    return fit_cost(one.tokens, one.seconds / images * grid.blocks)
