"""Load an encoder: the VAEs of SD 1.5, SDXL, SD3, Flux, HunyuanImage and Anima, and the tiny autoencoders."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import pip_install
from kohya_bucket.latents.architectures import ARCHITECTURES
from kohya_bucket.latents.vae.diffusers_encoder import DiffusersEncoder
from kohya_bucket.latents.vae.other_encoders import QwenImageEncoder, TinyEncoder
from kohya_bucket.latents.vae.single_file import autoencoder_class, vae_from_single_file
from kohya_bucket.latents.vae.weight_names import OTHER_AUTOENCODERS

if TYPE_CHECKING:
    import torch

__all__ = ["DiffusersEncoder", "QwenImageEncoder", "TinyEncoder", "load_encoder", "own_device", "usable_device"]

_KINDS = ("AutoencoderKL", "AutoencoderTiny", *OTHER_AUTOENCODERS)


def load_encoder(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: Any = "bfloat16",
    subfolder: str | None = None,
    architecture: str = "",
    **options: Any,
) -> DiffusersEncoder:
    """Load a VAE from a hub name, a folder in diffusers' format, or one `.safetensors` file.

    A whole model's folder or repository is searched for its `vae` subfolder; a file may be a VAE or a whole
    checkpoint, in diffusers' or in the original naming.

    Args:
        device: None takes the GPU of this process (`LOCAL_RANK`), or the CPU.
        dtype: type it computes in.
        subfolder: of the repository or folder.
        architecture: sd-scripts' name of the model family; needed for a bare VAE file, whose scale it decides.
        options: `tiling`, `slicing`, `xformers`, `compile`, see `DiffusersEncoder`.

    Raises:
        KohyaBucketError: diffusers is missing, or the model cannot be found or loaded.
    """
    if architecture and architecture not in ARCHITECTURES:
        raise KohyaBucketError(f"architecture is {architecture!r}, but must be one of {', '.join(ARCHITECTURES)}")
    try:
        diffusers = importlib.import_module("diffusers")
    except ImportError as error:
        raise KohyaBucketError(f"encoding needs diffusers ({error}): {pip_install('train')}") from error
    device = own_device() if device is None else usable_device(device)
    if Path(name).suffix.lower() in (".safetensors", ".sft"):
        vae, architecture = vae_from_single_file(diffusers, Path(name), architecture)
    else:
        vae = _from_pretrained(diffusers, str(name), subfolder)
        architecture = architecture or _family(vae)
    options |= {"device": device, "dtype": dtype, "architecture": architecture}
    kind = type(vae).__name__
    if kind == "AutoencoderKLQwenImage":
        return QwenImageEncoder(vae, **options)
    if kind == "AutoencoderTiny":
        family = ARCHITECTURES.get(architecture)
        scales = {} if family is None else {"scale_factor": family.scale_factor, "shift_factor": family.shift_factor}
        return TinyEncoder(vae, **scales, **options)
    return DiffusersEncoder(vae, **options)


def _from_pretrained(diffusers: Any, name: str, subfolder: str | None) -> Any:
    problems = []
    for folder in [subfolder] if subfolder else [None, "vae"]:
        where = {"subfolder": folder} if folder else {}
        try:
            config = diffusers.AutoencoderKL.load_config(name, **where)
        except (OSError, ValueError) as error:
            problems.append(str(error).strip().splitlines()[0])
            continue
        kind = config.get("_class_name", "")
        if kind not in _KINDS:
            problems.append(f"{name} holds a {kind or 'model without a name'}, not a VAE")
            continue
        try:
            return autoencoder_class(diffusers, kind).from_pretrained(name, **where)
        except (OSError, ValueError) as error:
            problems.append(str(error).strip().splitlines()[0])
    raise KohyaBucketError(
        f"no VAE at {name!r}: {'; '.join(dict.fromkeys(problems)).rstrip('.')}. "
        "Give a Hugging Face name, a folder with config.json, or a .safetensors file"
    )


def _family(vae: Any) -> str:
    """The family whose scale a VAE's config states."""
    if type(vae).__name__ in OTHER_AUTOENCODERS:
        return OTHER_AUTOENCODERS[type(vae).__name__]
    scale = getattr(vae.config, "scaling_factor", None)
    for arch in ARCHITECTURES.values():
        if scale and abs(scale - arch.scale_factor) < 1e-6 and vae.config.latent_channels == arch.channels:
            return arch.name
    return ""


def usable_device(device: Any) -> Any:
    """The device, if torch can use it here.

    Raises:
        KohyaBucketError: it does not exist, or this machine or this torch has none of its kind.
    """
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        why = str(error).strip().splitlines()[0].rstrip(".")
        raise KohyaBucketError(
            f"device is {str(device)!r}, which cannot be used here ({why}): leave it out to use "
            f"{'the CPU' if own_device() == 'cpu' else own_device()}"
        ) from error
    return device


def own_device() -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
