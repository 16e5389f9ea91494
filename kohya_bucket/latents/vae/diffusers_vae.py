"""Encoders over diffusers' autoencoders, and how they are loaded.

The VAEs of SD 1.5, SDXL, SD3, Flux, HunyuanImage and Anima, and the tiny autoencoders.

AutoencoderKL and its like have a distribution to sample from; the tiny autoencoders and Qwen-Image's have none.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.errors import KohyaBucketError
from kohya_bucket.extras import pip_install
from kohya_bucket.latents.architectures import ARCHITECTURES
from kohya_bucket.latents.dtypes import dtype_name
from kohya_bucket.latents.fingerprint import module_hash
from kohya_bucket.latents.vae.single_file import OTHER_AUTOENCODERS, autoencoder_class, vae_from_single_file

if TYPE_CHECKING:
    import torch


__all__ = ["DiffusersEncoder", "QwenImageEncoder", "TinyEncoder", "load_encoder", "own_device", "usable_device"]


class DiffusersEncoder:
    """`VAEEncoder` over a diffusers `AutoencoderKL` or `AutoencoderKLHunyuanImage`.

    Args:
        vae: the model, in the type its weights are to be hashed in.
        device: where it runs.
        dtype: type it computes in.
        tiling, slicing: encode in tiles, or image by image, to save memory.
        xformers: memory-efficient attention, where xformers is installed.
        compile: let `torch.compile` translate the encoder.
        architecture: sd-scripts' name of the model family, where known.
    """

    def __init__(
        self,
        vae: Any,
        *,
        device: str | torch.device = "cpu",
        dtype: Any = "float32",
        tiling: bool = False,
        slicing: bool = False,
        xformers: bool = False,
        compile: bool = False,
        architecture: str = "",
    ) -> None:
        import torch

        self.fingerprint = module_hash(vae)
        self.architecture = architecture
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype_name(dtype))
        if tiling:
            vae.enable_tiling()
        if slicing:
            vae.enable_slicing()
        if xformers:
            _use_xformers(vae)
        self.vae = vae.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)
        if compile:
            self.vae.encoder = torch.compile(self.vae.encoder)

    @property
    def downsample_factor(self) -> int:
        return int(2 ** (len(self.vae.config.block_out_channels) - 1))

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.latent_channels)

    @property
    def scale_factor(self) -> float:
        family = ARCHITECTURES.get(self.architecture)
        return float(self.vae.config.scaling_factor or (1.0 if family is None else family.scale_factor))

    @property
    def shift_factor(self) -> float:
        return float(getattr(self.vae.config, "shift_factor", None) or 0.0)

    def posterior(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation, unscaled, [B, C, h, w] each, on the encoder's device."""
        import torch

        with torch.inference_mode():
            found = self.vae.encode(pixels.to(device=self.device, dtype=self.dtype)).latent_dist
            return found.mean, found.std

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """The posterior's mean, scaled for training."""
        mean, _ = self.posterior(pixels)
        return (mean - self.shift_factor) * self.scale_factor

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 for a while: for images whose activations overflow in float16."""
        import torch

        before = self.dtype
        self.dtype = torch.float32
        self.vae.to(dtype=torch.float32)
        try:
            yield
        finally:
            self.dtype = before
            self.vae.to(dtype=before)


def _use_xformers(vae: Any) -> None:
    try:
        importlib.import_module("xformers")
    except ImportError as error:
        raise KohyaBucketError(f"xformers is not installed ({error}): {pip_install('xformers')}") from error
    vae.enable_xformers_memory_efficient_attention()


class TinyEncoder(DiffusersEncoder):
    """`VAEEncoder` over a diffusers `AutoencoderTiny`: no distribution, and its latents come out scaled.

    Args: as `DiffusersEncoder`; `scale_factor` and `shift_factor` are those of the VAE it stands in for.
    """

    def __init__(self, vae: Any, *, scale_factor: float = 1.0, shift_factor: float = 0.0, **options: Any) -> None:
        super().__init__(vae, **options)
        self._scale, self._shift = scale_factor, shift_factor

    posterior = None  # type: ignore[assignment]

    @property
    def downsample_factor(self) -> int:
        return int(2 ** (len(self.vae.config.encoder_block_out_channels) - 1))

    @property
    def scale_factor(self) -> float:
        return self._scale

    @property
    def shift_factor(self) -> float:
        return self._shift

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            out: torch.Tensor = self.vae.encode(pixels.to(device=self.device, dtype=self.dtype)).latents
            return out


class QwenImageEncoder(DiffusersEncoder):
    """`VAEEncoder` over a diffusers `AutoencoderKLQwenImage`, as sd-scripts uses it for Anima.

    The most probable latent, each channel less its mean and divided by its deviation, which the model's config
    states. There is no one scale, and sd-scripts draws no sample here, so there is no `posterior` either.
    """

    posterior = None  # type: ignore[assignment]
    scale_factor, shift_factor = 1.0, 0.0

    @property
    def downsample_factor(self) -> int:
        return int(2 ** len(self.vae.config.temperal_downsample))

    @property
    def latent_channels(self) -> int:
        return int(self.vae.config.z_dim)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        import torch

        def per_channel(values: list[float]) -> torch.Tensor:
            return torch.tensor(values).view(1, -1, 1, 1, 1).to(device=self.device, dtype=self.dtype)

        with torch.inference_mode():
            frames = pixels.to(device=self.device, dtype=self.dtype)[:, :, None]
            mode: torch.Tensor = self.vae.encode(frames).latent_dist.mode()
            config = self.vae.config
            # the inverse first, in the model's type: the operations of sd-scripts, so that low precision agrees
            return ((mode - per_channel(config.latents_mean)) * (1.0 / per_channel(config.latents_std)))[:, :, 0]


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
