"""Encoders over diffusers' autoencoders, and how they are loaded.

Supported are the VAEs of SD 1.5, SDXL, SD3, Flux, HunyuanImage and Anima. All but Anima's, which is Qwen-Image's, have
a distribution to sample from.

For a single safetensors file the VAE's config is derived from its weights, so nothing is downloaded. diffusers'
`from_single_file` (0.25, 0.32, 0.40) asks the Hub for a config, for any bare VAE that of SD 1.5, fails without a
network, and reads fewer kinds. Weights may have their original names or diffusers'.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kohya_bucket.checks import number_of_launch, quoted
from kohya_bucket.errors import KohyaBucketError, as_damage
from kohya_bucket.extras import pip_install
from kohya_bucket.latents.dtypes import dtype_name
from kohya_bucket.latents.families import MODEL_FAMILIES, ModelFamily
from kohya_bucket.latents.fingerprint import module_hash
from kohya_bucket.latents.hub import only_local
from kohya_bucket.latents.vae.single_frames import fold_single_frames

if TYPE_CHECKING:
    import torch

Weights = dict[str, Any]

# diffusers' class, and the model family whose autoencoder it is
OTHER_AUTOENCODERS = {a.autoencoder: a.name for a in MODEL_FAMILIES.values() if a.autoencoder != "AutoencoderKL"}

_HUNYUAN_MIDDLE = {"block_1": "resnets.0", "block_2": "resnets.1", "attn_1": "attentions.0"}
_HUNYUAN_ATTENTION = {"q": "to_q", "k": "to_k", "v": "to_v", "proj_out": "proj"}


def other_autoencoder(weights: Weights) -> str:
    """diffusers' class of a VAE's weights if it is Qwen-Image's or HunyuanImage's, else "".

    Qwen-Image's convolutions are three-dimensional. HunyuanImage halves the sides by moving pixels into channels, so
    that these convolutions, unlike AutoencoderKL's, have fewer outputs than inputs.
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
    """The weights under diffusers' names, and the config with which its class `kind` has their shapes."""
    if kind == "AutoencoderKLQwenImage":
        if "encoder.conv1.weight" in weights:  # built and named like Wan's
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
        side, way, level, block, leaf = match.groups()
        n = layers + (side == "decoder")
        at = int(level) * (n + 1) + (n if block is None else int(block))
        return f"{side}.{way}_blocks.{at}.{leaf.replace('nin_shortcut', 'conv_shortcut')}"
    if match := re.match(r"(encoder|decoder)\.mid\.(\w+)\.(\w+)\.(.*)", name):
        side, part, layer, leaf = match.groups()
        layer = _HUNYUAN_ATTENTION.get(layer, layer).replace("nin_shortcut", "conv_shortcut")
        return f"{side}.mid_block.{_HUNYUAN_MIDDLE.get(part, part)}.{layer}.{leaf}"
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
    """The VAE in a file, and its family.

    Raises:
        KohyaBucketError: no such file, no VAE in it, an unknown kind, or a bare VAE without `architecture`.
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
        supported = inspect.signature(diffusers.AutoencoderKL.__init__).parameters
        # An old diffusers lacks some options: its VAEs always have attention and quantizing convolutions, and no shift.
        if any(config[name] not in (True, None) for name in config.keys() - supported):
            version = getattr(diffusers, "__version__", "installed here")
            raise ValueError(f"diffusers {version} is too old for it: pip install -U diffusers")
        config = {name: value for name, value in config.items() if name in supported}
        if not any(name.startswith("encoder.down_blocks.") for name in weights):
            # The original names, which the converter expects as they are in a whole checkpoint.
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
    """The family of an AutoencoderKL, if `architecture` is "" by the other weights of its file, and its config."""
    if "encoder.conv_in.weight" not in weights:
        raise ValueError(f"it holds no VAE (no encoder.conv_in.weight among its {len(names)} tensors)")
    channels = _length(weights, "decoder.conv_in.weight", 1)
    marked = (a for a in MODEL_FAMILIES.values() if a.checkpoint_key)
    of_checkpoint = next((a.name for a in marked if any(n.startswith(a.checkpoint_key) for n in names)), "")
    architecture = architecture or of_checkpoint
    if not architecture:
        fitting = [a.name for a in MODEL_FAMILIES.values() if a.channels == channels]
        raise ValueError(
            "it does not say which family its VAE is of, and its scale depends on that: "
            f"add --arch {' or --arch '.join(fitting) or 'NAME'}"
        )
    family = MODEL_FAMILIES[architecture]
    if family.channels != channels:
        raise ValueError(f"it has {channels} latent channels, but {architecture} has {family.channels}")
    scales = {"scaling_factor": family.scale_factor, "shift_factor": family.shift_factor or None}
    return architecture, _config(weights, channels) | scales


def _converter(name: str) -> Any:
    """diffusers' function from the original names of weights to its own; that of AutoencoderKL has moved once."""
    try:
        module = importlib.import_module("diffusers.loaders.single_file_utils")
    except ImportError:  # until 0.26
        module = importlib.import_module("diffusers.pipelines.stable_diffusion.convert_from_ckpt")
    return getattr(module, name)


def autoencoder_class(diffusers: Any, kind: str) -> Any:
    """diffusers' class of that name. Raises `KohyaBucketError` if the installed diffusers is too old for it."""
    if not hasattr(diffusers, kind):
        version = getattr(diffusers, "__version__", "installed here")
        raise KohyaBucketError(f"diffusers {version} has no {kind}: install a newer one (pip install -U diffusers)")
    return getattr(diffusers, kind)


def _filled(kind: type, config: dict[str, Any], weights: Weights) -> Any:
    """The model with these weights, in their type; takes no memory besides theirs, whatever `config` says."""
    import torch

    with torch.device("meta"):
        vae = kind(**config)
    problems = vae.load_state_dict(weights, strict=False, assign=True)
    if problems.missing_keys or problems.unexpected_keys:
        strange = [*problems.missing_keys, *problems.unexpected_keys][:3]
        raise ValueError(f"its VAE is of another build than {kind.__name__} ({', '.join(strange)}, …)")
    return vae.to(dtype=next(iter(weights.values())).dtype)


def _config(weights: dict[str, Any], channels: int) -> dict[str, Any]:
    """AutoencoderKL's config, derived from shapes under the original or diffusers' names."""
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


class DiffusersEncoder:
    """`VAEEncoder` over a diffusers `AutoencoderKL` or `AutoencoderKLHunyuanImage`.

    Args:
        vae: the model, in the type in which its weights are hashed.
        device: where it runs.
        dtype: type it computes in.
        architecture: the model family, one of `MODEL_FAMILIES`, where known.

    Attributes:
        computes: the type it computes in, and why, where `load_encoder` chose it.
    """

    computes = ""

    def __init__(
        self,
        vae: Any,
        *,
        device: str | torch.device = "cpu",
        dtype: Any = "float32",
        architecture: str = "",
    ) -> None:
        import torch

        self.fingerprint = module_hash(vae)
        self.architecture = architecture
        self._describe(vae.config, MODEL_FAMILIES.get(architecture))
        self.device = torch.device(device)
        self.dtype: torch.dtype = getattr(torch, dtype_name(dtype))
        self.vae = vae.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)

    def _describe(self, config: Any, family: ModelFamily | None) -> None:
        self.downsample_factor = 2 ** (len(config.block_out_channels) - 1)
        self.latent_channels = int(config.latent_channels)
        self.scale_factor = float(config.scaling_factor or (1.0 if family is None else family.scale_factor))
        self.shift_factor = float(getattr(config, "shift_factor", None) or 0.0)

    def posterior(self, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and standard deviation, unscaled, [B, C, h, w] each, on the encoder's device."""
        distribution = self._encoded(pixels).latent_dist
        return distribution.mean, distribution.std

    def _encoded(self, pixels: torch.Tensor) -> Any:
        import torch

        with torch.inference_mode():
            return self.vae.encode(pixels.to(device=self.device, dtype=self.dtype))

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """The posterior's mean, scaled for training."""
        mean, _ = self.posterior(pixels)
        return (mean - self.shift_factor) * self.scale_factor

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Compute in float32 meanwhile, for images whose activations overflow in float16."""
        import torch

        usual = self.dtype
        self.dtype = torch.float32
        self.vae.to(dtype=torch.float32)
        try:
            yield
        finally:
            self.dtype = usual
            self.vae.to(dtype=usual)


class QwenImageEncoder(DiffusersEncoder):
    """`VAEEncoder` over a diffusers `AutoencoderKLQwenImage`, as Anima is trained with it.

    The latent is the mode of the distribution, each channel normalised by the mean and deviation in the model's config.
    There is no single scale and nothing is sampled, hence no `posterior`. Its 3D convolutions run in 2D.
    """

    posterior = None  # type: ignore[assignment]

    def __init__(self, vae: Any, **options: Any) -> None:
        fold_single_frames(vae)
        super().__init__(vae, **options)

    def _describe(self, config: Any, family: ModelFamily | None) -> None:
        self.downsample_factor = 2 ** len(config.temperal_downsample)
        self.latent_channels = int(config.z_dim)
        self.scale_factor, self.shift_factor = 1.0, 0.0

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        import torch

        def per_channel(values: list[float]) -> torch.Tensor:
            return torch.tensor(values).view(1, -1, 1, 1, 1).to(device=self.device, dtype=self.dtype)

        with torch.inference_mode():
            frames = pixels.to(device=self.device, dtype=self.dtype)[:, :, None]
            # Not `encode`, which would keep activations of each convolution for frames to come.
            mode = self.vae.quant_conv(self.vae.encoder(frames)).chunk(2, dim=1)[0]
            config = self.vae.config
            # Multiplied by the inverse, in the model's type, as trainers do: low precision agrees too.
            return ((mode - per_channel(config.latents_mean)) * (1.0 / per_channel(config.latents_std)))[:, :, 0]


_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def load_encoder(
    name: str | os.PathLike[str],
    *,
    device: str | torch.device | None = None,
    dtype: Any = "auto",
    subfolder: str | None = None,
    architecture: str = "",
) -> DiffusersEncoder:
    """Load a VAE from a hub name, a folder in diffusers' format, or a `.safetensors` file.

    In a whole model's folder or repository its `vae` subfolder is taken; a file may be a VAE or a whole checkpoint,
    with diffusers' or the original names.

    Args:
        device: None takes the GPU of this process (`LOCAL_RANK`), or the CPU.
        dtype: type it computes in; "auto" is the choice of `fitting_dtype`. On a CPU always float32.
        subfolder: of the repository or folder.
        architecture: the model family, one of `MODEL_FAMILIES`; needed for a bare VAE file, whose scale it decides.

    Raises:
        KohyaBucketError: diffusers is missing, or the model cannot be found or loaded.
    """
    if architecture and architecture not in MODEL_FAMILIES:
        raise KohyaBucketError(f"architecture is {architecture!r}, but must be one of {', '.join(MODEL_FAMILIES)}")
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
        if architecture:
            _refuse_other_family(str(name), vae, MODEL_FAMILIES[architecture])
        architecture = architecture or _family(vae)
    chosen, why = fitting_dtype(device, architecture in _WITHIN_FLOAT16)
    if str(dtype) != "auto":
        requested = dtype_name(dtype)
        if not (chosen == "float32" and str(device).startswith("cpu")):
            chosen, why = requested, "as asked"
    kind = QwenImageEncoder if type(vae).__name__ == "AutoencoderKLQwenImage" else DiffusersEncoder
    encoder = kind(vae, device=device, dtype=chosen, architecture=architecture)
    encoder.computes = f"{chosen} ({why})"
    return encoder


_WITHIN_FLOAT16 = ("sd",)  # SDXL's activations exceed 65,504; of the other families it is not known


def fitting_dtype(device: Any, within_float16: bool) -> tuple[str, str]:
    """The best type to compute a model in on a device, and why.

    Args:
        within_float16: no activation of the model exceeds float16.

    Returns:
        "float32" on a CPU; "bfloat16" on a GPU that supports it (NVIDIA's from compute capability 8.0 on; older ones
        emulate it slowly); else "float16" or "float32".
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
    problems, local = [], only_local(name)
    for folder in [subfolder] if subfolder else [None, "vae"]:
        where = {"local_files_only": local} | ({"subfolder": folder} if folder else {})
        try:
            config = diffusers.AutoencoderKL.load_config(name, **where)
            kind = config.get("_class_name", "")
            if kind not in ("AutoencoderKL", *OTHER_AUTOENCODERS):
                raise ValueError(f"{name} holds a {kind or 'model without a name'}, not a VAE")
            # safetensors: the other format is pickle, which may run code
            return autoencoder_class(diffusers, kind).from_pretrained(name, use_safetensors=True, **where)
        except KohyaBucketError:
            raise
        except Exception as error:  # diffusers fails in any way on a damaged config
            problems.append((str(error).strip() or type(error).__name__).splitlines()[0][:300])
    raise KohyaBucketError(
        f"no VAE at {quoted(name)}: {'; '.join(dict.fromkeys(problems)).rstrip('.')}. "
        "Give a Hugging Face name or a folder with config.json and safetensors, or a .safetensors file"
    )


def _family(vae: Any) -> str:
    if type(vae).__name__ in OTHER_AUTOENCODERS:
        return OTHER_AUTOENCODERS[type(vae).__name__]
    scale = getattr(vae.config, "scaling_factor", None)
    for arch in MODEL_FAMILIES.values():
        if scale and abs(scale - arch.scale_factor) < 1e-6 and vae.config.latent_channels == arch.channels:
            return arch.name
    return ""


def _refuse_other_family(name: str, vae: Any, family: ModelFamily) -> None:
    """Raise `KohyaBucketError` for a VAE whose latents are another family's, by its class, channels and scale."""
    actual = MODEL_FAMILIES.get(_family(vae))
    same = ("autoencoder", "channels", "scale_factor")
    if actual is None or all(getattr(actual, name) == getattr(family, name) for name in same):
        return
    raise KohyaBucketError(
        f"{name} is a VAE of {actual.name} (scale {actual.scale_factor:g}, {actual.channels} channels), and "
        f"{family.name} has scale {family.scale_factor:g} and {family.channels} channels: give a VAE of {family.name}, "
        f"or --arch {actual.name}"
    )


def usable_device(device: Any) -> Any:
    """The device, if torch can use it here. Raises `KohyaBucketError` where there is none, or torch lacks it."""
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
    """The GPU of this process, by its number on this machine; "cpu" without any."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{number_of_launch('LOCAL_RANK', 0, range(1 << 31)) % torch.cuda.device_count()}"
