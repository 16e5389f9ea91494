"""What stands behind the mask of FLUX's T5 outputs: whether its models read it, and what is stored of it.

Where the mask is applied, FLUX attends to no text behind the caption, and Chroma to the first position there. What they
do not attend to changes neither an output nor a gradient by a bit, since its weight is exactly 0. That is not taken on
trust: both models of the checkout at hand are built small, and run twice.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

_STATES, _MASK, _APPLIED = "t5_out", "t5_attn_mask", "apply_t5_attn_mask"
_READ_BEHIND = 1  # positions that Chroma attends to behind a caption
_SIZES = {
    "in_channels": 16, "context_in_dim": 16, "hidden_size": 32, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2,
    "depth_single_blocks": 2, "axes_dim": [4, 6, 6], "theta": 10_000, "qkv_bias": True, "guidance_embed": True,
}  # fmt: skip
_MODELS = {
    "flux_models": ("Flux", "FluxParams", {"vec_in_dim": 8}),
    "chroma_models": ("Chroma", "ChromaParams", {
        "approximator_in_dim": 16, "approximator_depth": 1, "approximator_hidden_size": 16, "_use_compiled": False,
    }),
}  # fmt: skip

logger = logging.getLogger("kohya_bucket")


def is_left_out(family: str, encoding: Any) -> bool:
    """Whether this run stores no more of FLUX's outputs than its models read.

    Args:
        family: the model family.
        encoding: sd-scripts' strategy of encoding, which knows whether the mask is applied.
    """
    return family == "flux" and bool(getattr(encoding, _APPLIED, False)) and _is_unread()


def without_unread(arrays: Mapping[str, Any]) -> Mapping[str, Any]:
    """The outputs with 0 at the positions that are not read; as they are where the mask is not applied."""
    if not {_STATES, _MASK, _APPLIED} <= arrays.keys() or not arrays[_APPLIED]:
        return arrays
    states, mask = np.array(arrays[_STATES]), np.asarray(arrays[_MASK])
    states[np.flatnonzero(mask).max(initial=-1) + 1 + _READ_BEHIND :] = 0
    return {**arrays, _STATES: states}


@functools.lru_cache(maxsize=1)
def _is_unread() -> bool:
    """Whether no model that takes FLUX's outputs reads what is behind the mask."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a tenth of a second; on a busy machine threads that wait for each other take many
    try:
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False), torch.enable_grad():
            unread = all(map(_ignores_what_is_behind, _MODELS))
    except Exception as error:  # whatever code of an unknown version raises
        logger.debug("FLUX's models could not be tried: %s", error)
        unread = False
    finally:
        torch.set_num_threads(threads)
    if not unread:
        logger.info("FLUX's outputs are stored with the masked positions, because this sd-scripts may read them")
    return unread


def _ignores_what_is_behind(module: str) -> bool:
    """Whether a small model's output and gradients are the same bits, whatever stands behind the mask."""
    import torch

    home = importlib.import_module(f"library.{module}")
    model, parameters, more = _MODELS[module]
    torch.default_generator.manual_seed(0)  # the CPU's alone: a GPU's draws the training's noise from the user's seed
    small = getattr(home, model)(getattr(home, parameters)(**_SIZES, **more))
    for parameter in small.parameters():  # some begin as 0, behind which nothing would show
        torch.nn.init.normal_(parameter, std=0.1)
    lengths, longest = torch.tensor([3, 9]), 24
    mask = (torch.arange(longest) < lengths[:, None]).long()
    given = {
        "img": torch.randn(2, 4, 16), "img_ids": torch.zeros(2, 4, 3), "txt_ids": torch.zeros(2, longest, 3),
        "y": torch.randn(2, 8), "timesteps": torch.tensor([0.2, 0.7]), "guidance": torch.ones(2),
        "txt_attention_mask": mask,
    }  # fmt: skip
    text = torch.randn(2, longest, 16)
    behind = torch.arange(longest) >= lengths[:, None] + _READ_BEHIND

    def run(text: Any) -> list[bytes]:
        small.zero_grad()
        output = small(txt=text, **given)
        output.square().mean().backward()
        found = [output.detach(), *(p.grad for p in small.parameters() if p.grad is not None)]
        return [tensor.numpy().tobytes() for tensor in found]

    whole = run(text)
    other_caption = text + (torch.arange(longest) < 2)[:, None]
    return (
        run(text.masked_fill(behind[..., None], 0)) == whole
        and run(text + behind[..., None] * torch.randn_like(text)) == whole
        and run(other_caption)[0] != whole[0]  # or the model takes no notice of texts at all
    )
