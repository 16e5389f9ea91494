"""A VAE out of one safetensors file: its shape is read off the weights, so nothing is fetched."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.latents.architectures import ARCHITECTURES
from kohya_bucket.latents.vae.weight_names import OTHER_AUTOENCODERS, other_autoencoder, to_diffusers_names

__all__ = ["autoencoder_class", "vae_from_single_file"]

_PREFIXES = ("first_stage_model.", "vae.")


def vae_from_single_file(diffusers: Any, path: Path, architecture: str) -> tuple[Any, str]:
    """The VAE in a file and its family.

    Raises:
        KohyaBucketError: no such file, no VAE in it, or a bare VAE without `architecture`.
    """
    if not path.is_file():
        raise KohyaBucketError(f"{path} does not exist: give a VAE or a checkpoint as .safetensors")
    safetensors = importlib.import_module("safetensors")
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            names = list(file.keys())
            prefix = next((p for p in _PREFIXES if any(n.startswith(f"{p}encoder.") for n in names)), "")
            wanted = [n for n in names if n.startswith((f"{prefix}encoder.", f"{prefix}decoder.", f"{prefix}quant_",
                                                        f"{prefix}post_quant_", f"{prefix}conv1.",
                                                        f"{prefix}conv2."))]  # fmt: skip
            weights = {n[len(prefix) :]: file.get_tensor(n) for n in wanted}
    except (OSError, safetensors.SafetensorError) as error:
        raise KohyaBucketError(f"{path} cannot be read: {error}") from error
    if kind := other_autoencoder(weights):
        return _other(diffusers, path, kind, weights, architecture)
    if "encoder.conv_in.weight" not in weights or "decoder.conv_in.weight" not in weights:
        raise KohyaBucketError(f"{path} holds no VAE (no encoder.conv_in.weight among its {len(names)} tensors)")
    marked = (a for a in ARCHITECTURES.values() if a.checkpoint_key)
    found = next((a.name for a in marked if any(n.startswith(a.checkpoint_key) for n in names)), "")
    architecture = architecture or found
    channels = int(weights["decoder.conv_in.weight"].shape[1])
    if not architecture:
        fitting = [a.name for a in ARCHITECTURES.values() if a.channels == channels]
        raise KohyaBucketError(
            f"{path} does not say which family its VAE is of, and its scale depends on that: "
            f"add --arch {' or --arch '.join(fitting) or 'NAME'}"
        )
    family = ARCHITECTURES[architecture]
    if family.channels != channels:
        raise KohyaBucketError(f"{path} has {channels} latent channels, but {architecture} has {family.channels}")
    config = _config(weights, channels)
    config |= {"scaling_factor": family.scale_factor, "shift_factor": family.shift_factor or None}
    _refuse_unknown(diffusers, config, path)
    if not any(name.startswith("encoder.down_blocks.") for name in weights):
        weights = _converter()({f"first_stage_model.{name}": tensor for name, tensor in weights.items()}, config)
    vae = diffusers.AutoencoderKL(**config)
    return _filled(vae, weights, path), architecture


def _refuse_unknown(diffusers: Any, config: dict[str, Any], path: Path) -> None:
    """A VAE without quantizing convolutions, such as FLUX's, is none that an old diffusers can make."""
    without = config.get("use_quant_conv") is False
    if without and "use_quant_conv" not in inspect.signature(diffusers.AutoencoderKL.__init__).parameters:
        version = getattr(diffusers, "__version__", "installed here")
        raise KohyaBucketError(f"{path}: diffusers {version} is too old for this VAE: pip install -U diffusers")


def _converter() -> Any:
    """diffusers' function from the original names of an AutoencoderKL's weights to its own; it has moved once."""
    try:
        module = importlib.import_module("diffusers.loaders.single_file_utils")
    except ImportError:  # until 0.26
        module = importlib.import_module("diffusers.pipelines.stable_diffusion.convert_from_ckpt")
    return module.convert_ldm_vae_checkpoint


def autoencoder_class(diffusers: Any, kind: str) -> Any:
    """diffusers' class of that name. Raises `KohyaBucketError` where the installed diffusers is too old to have it."""
    found = getattr(diffusers, kind, None)
    if found is None:
        version = getattr(diffusers, "__version__", "installed here")
        raise KohyaBucketError(f"diffusers {version} has no {kind}: install a newer one (pip install -U diffusers)")
    return found


def _other(diffusers: Any, path: Path, kind: str, weights: dict[str, Any], architecture: str) -> tuple[Any, str]:
    """An autoencoder that is no AutoencoderKL, and its family."""
    family = OTHER_AUTOENCODERS[kind]
    if architecture not in ("", family):
        raise KohyaBucketError(f"{path} is the VAE of {family} ({kind}), not of {architecture}")
    weights, config = to_diffusers_names(kind, weights)
    return _filled(autoencoder_class(diffusers, kind)(**config), weights, path), family


def _filled(vae: Any, weights: dict[str, Any], path: Path) -> Any:
    """The model with these weights, in their type."""
    problems = vae.load_state_dict(weights, strict=False)
    if problems.missing_keys or problems.unexpected_keys:
        strange = [*problems.missing_keys, *problems.unexpected_keys][:3]
        raise KohyaBucketError(
            f"{path}: its VAE is of another build than {type(vae).__name__} ({', '.join(strange)}, …)"
        )
    return vae.to(dtype=next(iter(weights.values())).dtype)


def _config(weights: dict[str, Any], channels: int) -> dict[str, Any]:
    """AutoencoderKL's options, read off the shapes, in the original or in diffusers' naming."""
    original = not any(name.startswith("encoder.down_blocks.") for name in weights)
    first, resnet = ("encoder.down", "block") if original else ("encoder.down_blocks", "resnets")
    widths: list[int] = []
    layers = 0
    while f"{first}.{len(widths)}.{resnet}.0.conv1.weight" in weights:
        widths.append(int(weights[f"{first}.{len(widths)}.{resnet}.0.conv1.weight"].shape[0]))
    while f"{first}.0.{resnet}.{layers}.conv1.weight" in weights:
        layers += 1
    attention = any(name.startswith(("encoder.mid.attn", "encoder.mid_block.attentions")) for name in weights)
    return {
        "in_channels": int(weights["encoder.conv_in.weight"].shape[1]),
        "out_channels": int(weights["decoder.conv_out.weight"].shape[0]),
        "down_block_types": ("DownEncoderBlock2D",) * len(widths),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "block_out_channels": tuple(widths),
        "layers_per_block": layers,
        "latent_channels": channels,
        "use_quant_conv": "quant_conv.weight" in weights,
        "use_post_quant_conv": "post_quant_conv.weight" in weights,
        "mid_block_add_attention": attention,
    }
