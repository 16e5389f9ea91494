"""Weights of Qwen-Image's and HunyuanImage's autoencoders: original names to diffusers', and the model's shape.

Anima uses Qwen-Image's. Both kinds of names are in use: models published for other programs have the original ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from kohya_bucket.latents.architectures import ARCHITECTURES

__all__ = ["OTHER_AUTOENCODERS", "other_autoencoder", "to_diffusers_names"]

Weights = dict[str, Any]

# diffusers' class, and the model family that sd-scripts trains with it
OTHER_AUTOENCODERS = {a.autoencoder: a.name for a in ARCHITECTURES.values() if a.autoencoder != "AutoencoderKL"}

_QWEN_BLOCK = {"residual.0": "norm1", "residual.2": "conv1", "residual.3": "norm2", "residual.6": "conv2",
               "shortcut": "conv_shortcut"}  # fmt: skip
_HUNYUAN_MIDDLE = {"block_1": "resnets.0", "block_2": "resnets.1", "attn_1": "attentions.0"}
_HUNYUAN_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "proj"}


def other_autoencoder(weights: Weights) -> str:
    """diffusers' class of a VAE's weights, "" for what is neither of the two.

    Qwen-Image's convolutions are three-dimensional. HunyuanImage halves the sides by moving pixels into channels,
    so that these convolutions, other than AutoencoderKL's, have fewer outputs than inputs.
    """
    first = weights.get("encoder.conv1.weight", weights.get("encoder.conv_in.weight"))
    if first is not None and first.ndim == 5:
        return "AutoencoderKLQwenImage"
    halving = weights.get("encoder.down.0.downsample.conv.weight")
    if "encoder.down_blocks.0.conv1.weight" in weights or (halving is not None and halving.shape[0] < halving.shape[1]):
        return "AutoencoderKLHunyuanImage"
    return ""


def to_diffusers_names(kind: str, weights: Weights) -> tuple[Weights, dict[str, Any]]:
    """The weights under diffusers' names, and the arguments with which its class `kind` has their shapes."""
    if kind == "AutoencoderKLQwenImage":
        blocks = _count(weights, "encoder.downsamples.{}.residual.0.gamma")
        if "encoder.conv1.weight" in weights:
            weights = _renamed(weights, lambda name: _qwen_name(name, blocks))
        return weights, _qwen_config(weights)
    if "encoder.down.0.block.0.conv1.weight" in weights:
        layers = _count(weights, "encoder.down.0.block.{}.conv1.weight")
        weights = _renamed(weights, lambda name: _hunyuan_name(name, layers))
    return weights, _hunyuan_config(weights)


def _renamed(weights: Weights, rename: Callable[[str], str]) -> Weights:
    return {rename(name): tensor for name, tensor in weights.items()}


def _count(weights: Iterable[str], pattern: str) -> int:
    names, n = set(weights), 0
    while pattern.format(n) in names:
        n += 1
    return n


def _qwen_name(name: str, blocks: int) -> str:
    """`blocks`: residual blocks before each halving; the decoder has one more before each doubling."""
    name = re.sub(r"^conv1\.", "quant_conv.", name)
    name = re.sub(r"^conv2\.", "post_quant_conv.", name)
    name = re.sub(r"^(encoder|decoder)\.conv1\.", r"\1.conv_in.", name)
    name = name.replace(".head.0.", ".norm_out.").replace(".head.2.", ".conv_out.")
    name = re.sub(r"\.middle\.([02])\.", lambda m: f".mid_block.resnets.{int(m[1]) // 2}.", name)
    name = name.replace(".middle.1.", ".mid_block.attentions.0.").replace(".downsamples.", ".down_blocks.")

    def up(match: re.Match[str]) -> str:
        level, place = divmod(int(match[1]), blocks + 2)
        return f".up_blocks.{level}." + (f"resnets.{place}." if place <= blocks else "upsamplers.0.")

    name = re.sub(r"\.upsamples\.(\d+)\.", up, name)
    for theirs, ours in _QWEN_BLOCK.items():
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def _hunyuan_name(name: str, layers: int) -> str:
    """`layers`: residual blocks per level of the encoder; the decoder's levels have one more."""
    if match := re.match(r"(encoder|decoder)\.(down|up)\.(\d+)\.(?:block\.(\d+)|(?:down|up)sample)\.(.*)", name):
        side, way, level, block, rest = match.groups()
        n = layers + (side == "decoder")
        at = int(level) * (n + 1) + (n if block is None else int(block))
        return f"{side}.{way}_blocks.{at}.{rest.replace('nin_shortcut', 'conv_shortcut')}"
    if match := re.match(r"(encoder|decoder)\.mid\.(\w+)\.(\w+)\.(.*)", name):
        side, part, layer, rest = match.groups()
        layer = _HUNYUAN_ATTENTION.get(layer, layer).replace("nin_shortcut", "conv_shortcut")
        return f"{side}.mid_block.{_HUNYUAN_MIDDLE.get(part, part)}.{layer}.{rest}"
    return name


def _levels(weights: Weights, width_of: str, halving: str) -> tuple[list[int], int, list[int]]:
    """Of the encoder: its levels' widths, residual blocks per level, and the flat positions of what halves."""
    widths: list[int] = []
    halvings: list[int] = []
    n = 0
    while True:
        if (block := weights.get(f"encoder.down_blocks.{n}.{width_of}")) is not None:
            if len(widths) == len(halvings):
                widths.append(0)
            widths[-1] = int(block.shape[0])
        elif f"encoder.down_blocks.{n}.{halving}" in weights:
            halvings.append(n)
        else:
            break
        n += 1
    return widths, (n - len(halvings)) // max(1, len(widths)), halvings


def _qwen_config(weights: Weights) -> dict[str, Any]:
    widths, blocks, halvings = _levels(weights, "conv2.weight", "resample.1.weight")
    base = int(weights["encoder.conv_in.weight"].shape[0])
    return {
        "base_dim": base,
        "z_dim": int(weights["decoder.conv_in.weight"].shape[1]),
        "dim_mult": [width // base for width in widths],
        "num_res_blocks": blocks,
        "temperal_downsample": [f"encoder.down_blocks.{n}.time_conv.weight" in weights for n in halvings],
    }


def _hunyuan_config(weights: Weights) -> dict[str, Any]:
    widths, blocks, halvings = _levels(weights, "conv2.weight", "conv.weight")
    return {
        "in_channels": int(weights["encoder.conv_in.weight"].shape[1]),
        "out_channels": int(weights["decoder.conv_out.weight"].shape[0]),
        "latent_channels": int(weights["decoder.conv_in.weight"].shape[1]),
        "block_out_channels": tuple(widths),
        "layers_per_block": blocks,
        "spatial_compression_ratio": 2 ** len(halvings),
        "sample_size": 384,
    }
