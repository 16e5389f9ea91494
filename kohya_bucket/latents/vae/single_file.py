"""A VAE out of one safetensors file: its shape is read off the weights, so nothing is fetched.

diffusers' own `from_single_file` (0.25, 0.32, 0.40) asks the Hub for a config, that of SD 1.5 for any bare VAE, ends in
an error without a network, and reads fewer kinds. Original names of weights and diffusers' are both read.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.latents.architectures import ARCHITECTURES

Weights = dict[str, Any]

# diffusers' class, and the model family that sd-scripts trains with it
OTHER_AUTOENCODERS = {a.autoencoder: a.name for a in ARCHITECTURES.values() if a.autoencoder != "AutoencoderKL"}

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
    if "encoder.down_blocks.0.conv1.weight" in weights or (
        halving is not None and halving.ndim > 1 and halving.shape[0] < halving.shape[1]
    ):
        return "AutoencoderKLHunyuanImage"
    return ""


def to_diffusers_names(kind: str, weights: Weights) -> tuple[Weights, dict[str, Any]]:
    """The weights under diffusers' names, and the arguments with which its class `kind` has their shapes."""
    if kind == "AutoencoderKLQwenImage":
        if "encoder.conv1.weight" in weights:  # it has the build of Wan's, and its names
            weights = _converter("convert_wan_vae_to_diffusers")(weights)
        return weights, {"base_dim": _length(weights, "encoder.conv_in.weight", 0)}
    if "encoder.down.0.block.0.conv1.weight" in weights:
        layers = _count(weights, "encoder.down.0.block.{}.conv1.weight")
        weights = {_hunyuan_name(name, layers): tensor for name, tensor in weights.items()}
    return weights, _hunyuan_config(weights)


def _length(weights: Weights, name: str, axis: int) -> int:
    if name not in weights:
        raise ValueError(f"it has no {name}")
    shape = list(weights[name].shape)
    if len(shape) <= axis or not shape[axis]:
        raise ValueError(f"its {name} has shape {shape}")
    return int(shape[axis])


def _count(weights: Iterable[str], pattern: str) -> int:
    names, n = set(weights), 0
    while pattern.format(n) in names:
        n += 1
    return n


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


def _hunyuan_config(weights: Weights) -> dict[str, Any]:
    widths: list[int] = []  # of the encoder's levels
    halvings, n = 0, 0
    while True:
        if (block := f"encoder.down_blocks.{n}.conv2.weight") in weights:
            if len(widths) == halvings:
                widths.append(0)
            widths[-1] = _length(weights, block, 0)
        elif f"encoder.down_blocks.{n}.conv.weight" in weights:
            halvings += 1
        else:
            break
        n += 1
    return {
        "in_channels": _length(weights, "encoder.conv_in.weight", 1),
        "out_channels": _length(weights, "decoder.conv_out.weight", 0),
        "latent_channels": _length(weights, "decoder.conv_in.weight", 1),
        "block_out_channels": tuple(widths),
        "layers_per_block": (n - halvings) // max(1, len(widths)),
        "spatial_compression_ratio": 2**halvings,
        "sample_size": 384,
    }


_PREFIXES = ("first_stage_model.", "vae.")


def vae_from_single_file(diffusers: Any, path: Path, architecture: str) -> tuple[Any, str]:
    """The VAE in a file and its family.

    Raises:
        KohyaBucketError: no such file, no VAE in it, one of another build, or a bare VAE without `architecture`.
    """
    if not path.is_file():
        raise KohyaBucketError(f"{path} does not exist: give a VAE or a checkpoint as .safetensors")
    with as_damage(f"{path} cannot be read as a VAE", error=KohyaBucketError):
        names, weights = _weights_in(path)
        if kind := other_autoencoder(weights):
            family = OTHER_AUTOENCODERS[kind]
            if architecture not in ("", family):
                raise ValueError(f"it is the VAE of {family} ({kind}), not of {architecture}")
            vae_class = autoencoder_class(diffusers, kind)
            weights, config = to_diffusers_names(kind, weights)
            return _filled(vae_class, config, weights), family
        architecture, config = _family_and_config(names, weights, architecture)
        config = _as_known(diffusers, config)
        if not any(name.startswith("encoder.down_blocks.") for name in weights):
            original = {f"first_stage_model.{name}": tensor for name, tensor in weights.items()}
            weights = _converter("convert_ldm_vae_checkpoint")(original, config)
        return _filled(diffusers.AutoencoderKL, config, weights), architecture


def _weights_in(path: Path) -> tuple[list[str], Weights]:
    """Names of all tensors of a file, and those of its VAE without their prefix."""
    with importlib.import_module("safetensors").safe_open(str(path), framework="pt") as file:
        names = list(file.keys())
        prefix = next((p for p in _PREFIXES if any(n.startswith(f"{p}encoder.") for n in names)), "")
        parts = tuple(prefix + part for part in ("encoder.", "decoder.", "quant_", "post_quant_", "conv1.", "conv2."))
        return names, {n[len(prefix) :]: file.get_tensor(n) for n in names if n.startswith(parts)}


def _family_and_config(names: list[str], weights: Weights, architecture: str) -> tuple[str, dict[str, Any]]:
    """The family of an AutoencoderKL, as the rest of its file says where `architecture` is "", and its options."""
    if "encoder.conv_in.weight" not in weights:
        raise ValueError(f"it holds no VAE (no encoder.conv_in.weight among its {len(names)} tensors)")
    channels = _length(weights, "decoder.conv_in.weight", 1)
    marked = (a for a in ARCHITECTURES.values() if a.checkpoint_key)
    found = next((a.name for a in marked if any(n.startswith(a.checkpoint_key) for n in names)), "")
    architecture = architecture or found
    if not architecture:
        fitting = [a.name for a in ARCHITECTURES.values() if a.channels == channels]
        raise ValueError(
            "it does not say which family its VAE is of, and its scale depends on that: "
            f"add --arch {' or --arch '.join(fitting) or 'NAME'}"
        )
    family = ARCHITECTURES[architecture]
    if family.channels != channels:
        raise ValueError(f"it has {channels} latent channels, but {architecture} has {family.channels}")
    scales = {"scaling_factor": family.scale_factor, "shift_factor": family.shift_factor or None}
    return architecture, _config(weights, channels) | scales


def _as_known(diffusers: Any, config: dict[str, Any]) -> dict[str, Any]:
    """Without options that an old diffusers lacks: its VAEs have attention and quantizing convolutions, no shift."""
    known = inspect.signature(diffusers.AutoencoderKL.__init__).parameters
    if any(config[name] not in (True, None) for name in config.keys() - known):
        version = getattr(diffusers, "__version__", "installed here")
        raise ValueError(f"diffusers {version} is too old for it: pip install -U diffusers")
    return {name: value for name, value in config.items() if name in known}


def _converter(name: str) -> Any:
    """diffusers' function from the original names of weights to its own; that of AutoencoderKL has moved once."""
    try:
        module = importlib.import_module("diffusers.loaders.single_file_utils")
    except ImportError:  # until 0.26
        module = importlib.import_module("diffusers.pipelines.stable_diffusion.convert_from_ckpt")
    return getattr(module, name)


def autoencoder_class(diffusers: Any, kind: str) -> Any:
    """diffusers' class of that name. Raises `KohyaBucketError` where the installed diffusers is too old to have it."""
    found = getattr(diffusers, kind, None)
    if found is None:
        version = getattr(diffusers, "__version__", "installed here")
        raise KohyaBucketError(f"diffusers {version} has no {kind}: install a newer one (pip install -U diffusers)")
    return found


def _filled(kind: type, config: dict[str, Any], weights: Weights) -> Any:
    """The model with these weights, in their type; it takes no memory besides theirs, whatever `config` says."""
    import torch

    with torch.device("meta"):
        vae = kind(**config)
    problems = vae.load_state_dict(weights, strict=False, assign=True)
    if problems.missing_keys or problems.unexpected_keys:
        strange = [*problems.missing_keys, *problems.unexpected_keys][:3]
        raise ValueError(f"its VAE is of another build than {kind.__name__} ({', '.join(strange)}, …)")
    return vae.to(dtype=next(iter(weights.values())).dtype)


def _config(weights: dict[str, Any], channels: int) -> dict[str, Any]:
    """AutoencoderKL's options, read off the shapes, in the original or in diffusers' naming."""
    original = not any(name.startswith("encoder.down_blocks.") for name in weights)
    first, resnet = ("encoder.down", "block") if original else ("encoder.down_blocks", "resnets")
    widths: list[int] = []
    while (name := f"{first}.{len(widths)}.{resnet}.0.conv1.weight") in weights:
        widths.append(_length(weights, name, 0))
    layers = _count(weights, f"{first}.0.{resnet}.{{}}.conv1.weight")
    attention = any(name.startswith(("encoder.mid.attn", "encoder.mid_block.attentions")) for name in weights)
    return {
        "in_channels": _length(weights, "encoder.conv_in.weight", 1),
        "out_channels": _length(weights, "decoder.conv_out.weight", 0),
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "block_out_channels": tuple(widths),
        "layers_per_block": layers,
        "latent_channels": channels,
        "use_quant_conv": "quant_conv.weight" in weights,
        "use_post_quant_conv": "post_quant_conv.weight" in weights,
        "mid_block_add_attention": attention,
    }
