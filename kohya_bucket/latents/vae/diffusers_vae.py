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
from kohya_bucket.latents.architectures import ARCHITECTURES, Architecture
from kohya_bucket.latents.dtypes import dtype_name
from kohya_bucket.latents.fingerprint import module_hash
from kohya_bucket.latents.vae.single_file import OTHER_AUTOENCODERS, autoencoder_class, vae_from_single_file

if TYPE_CHECKING:
    import torch


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

    Attributes:
        computes: the type that it computes in, and why, where `load_encoder` chose it.
    """

    computes = ""

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
        self._describe(vae.config, ARCHITECTURES.get(architecture))
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

    def _describe(self, config: Any, family: Architecture | None) -> None:
        self.downsample_factor = 2 ** (len(config.block_out_channels) - 1)
        self.latent_channels = int(config.latent_channels)
        self.scale_factor = float(config.scaling_factor or (1.0 if family is None else family.scale_factor))
        self.shift_factor = float(getattr(config, "shift_factor", None) or 0.0)

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
    """`VAEEncoder` over a diffusers `AutoencoderTiny`: no distribution, and its latents come out scaled."""

    posterior = None  # type: ignore[assignment]

    def _describe(self, config: Any, family: Architecture | None) -> None:
        self.downsample_factor = 2 ** (len(config.encoder_block_out_channels) - 1)
        self.latent_channels = int(config.latent_channels)
        # of the VAE that it stands in for
        self.scale_factor, self.shift_factor = (
            (1.0, 0.0) if family is None else (family.scale_factor, family.shift_factor)
        )

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

    def _describe(self, config: Any, family: Architecture | None) -> None:
        self.downsample_factor = 2 ** len(config.temperal_downsample)
        self.latent_channels = int(config.z_dim)
        self.scale_factor, self.shift_factor = 1.0, 0.0

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
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def load_encoder(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: Any = "auto",
    subfolder: str | None = None,
    architecture: str = "",
    **options: Any,
) -> DiffusersEncoder:
    """Load a VAE from a hub name, a folder in diffusers' format, or one `.safetensors` file.

    A whole model's folder or repository is searched for its `vae` subfolder; a file may be a VAE or a whole
    checkpoint, in diffusers' or in the original naming.

    Args:
        device: None takes the GPU of this process (`LOCAL_RANK`), or the CPU.
        dtype: type it computes in; "auto" is what `fitting_dtype` says. On a CPU always float32.
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
    suffix = Path(name).suffix.lower()
    if suffix in _PICKLES:
        raise KohyaBucketError(f"{name}: {suffix} files can run code when they are read: give it as .safetensors")
    if suffix in (".safetensors", ".sft"):
        vae, architecture = vae_from_single_file(diffusers, Path(name), architecture)
    else:
        vae = _from_pretrained(diffusers, str(name), subfolder)
        architecture = architecture or _family(vae)
    kind = {"AutoencoderKLQwenImage": QwenImageEncoder, "AutoencoderTiny": TinyEncoder}.get(type(vae).__name__)
    dtype, why = _computing(dtype, device, architecture)
    encoder = (kind or DiffusersEncoder)(vae, device=device, dtype=dtype, architecture=architecture, **options)
    encoder.computes = f"{dtype} ({why})"
    return encoder


def _computing(dtype: Any, device: Any, architecture: str) -> tuple[str, str]:
    fitting, why = fitting_dtype(device, architecture in _WITHIN_FLOAT16)
    if str(dtype) == "auto":
        return fitting, why
    asked = dtype_name(dtype)
    return (fitting, why) if fitting == "float32" and str(device).startswith("cpu") else (asked, "as asked")


_WITHIN_FLOAT16 = ("sd",)  # SDXL's activations pass 65,504; of the other families it is not known that none does


def fitting_dtype(device: Any, within_float16: bool) -> tuple[str, str]:
    """The type that a model is best computed in on a device, and why.

    Args:
        within_float16: none of the model's activations is too large for float16.

    Returns:
        "float32" on a CPU; "bfloat16" on a GPU that computes in it (of NVIDIA's from compute capability 8.0 on, older
        ones imitate it slowly); else "float16" or "float32".
    """
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return "float32", "on most CPUs bfloat16 is many times slower"
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device)[0] >= 8:
        return "bfloat16", f"on {device.type}"
    if within_float16:
        return "float16", "this GPU has no bfloat16"
    return "float32", "this GPU has no bfloat16, and float16 may overflow"


def _from_pretrained(diffusers: Any, name: str, subfolder: str | None) -> Any:
    problems = []
    for folder in [subfolder] if subfolder else [None, "vae"]:
        where = {"subfolder": folder} if folder else {}
        try:
            config = diffusers.AutoencoderKL.load_config(name, **where)
            kind = config.get("_class_name", "")
            if kind not in _KINDS:
                raise ValueError(f"{name} holds a {kind or 'model without a name'}, not a VAE")
            _refuse_huge(autoencoder_class(diffusers, kind), config)
            # the other format is Python's own, which may run code
            return getattr(diffusers, kind).from_pretrained(name, use_safetensors=True, **where)
        except KohyaBucketError:
            raise
        except Exception as error:  # a config of any content goes through code that expects a good one
            problems.append((str(error).strip() or type(error).__name__).splitlines()[0][:300])
    raise KohyaBucketError(
        f"no VAE at {name!r}: {'; '.join(dict.fromkeys(problems)).rstrip('.')}. "
        "Give a Hugging Face name or a folder with config.json and safetensors, or a .safetensors file"
    )


_MOST_WEIGHTS = 1 << 30  # HunyuanImage's has 400 million
_WIDEST, _MOST_BLOCKS, _LONGEST = 1 << 14, 64, 256


def _refuse_huge(kind: Any, config: dict[str, Any]) -> None:
    """Refuse a config of which no VAE is made, before memory is taken for one."""
    import torch

    for name, value in config.items():
        numbers = value if isinstance(value, list) else [value]
        most = _MOST_BLOCKS if "layers" in name or "blocks" in name else _WIDEST
        if len(numbers) > _LONGEST or any(isinstance(n, int) and abs(n) > most for n in numbers):
            raise ValueError(f"its config.json says {name} = {str(value)[:80]}, which no VAE has")
    with torch.device("meta"):
        weights = sum(tensor.numel() for tensor in kind.from_config(config).parameters())
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"by its config.json it has {weights:,} weights, which no VAE has")


def _family(vae: Any) -> str:
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
