"""The VAE that a command is given, loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kohya_bucket.errors import ConfigError, KohyaBucketError
from kohya_bucket.extras import pip_install
from kohya_bucket.latents.architectures import ARCHITECTURES, Architecture

__all__ = ["VaeOptions", "load_vae", "vae_hash_of"]


@dataclass(frozen=True)
class VaeOptions:
    """Which VAE, and how it runs; each field is an option."""

    vae: Annotated[str, typer.Option("--vae", help="Hub name, folder, or .safetensors file.")] = ""
    dtype: Annotated[str, typer.Option(help="Stored and computed as float32, float16 or bfloat16.")] = "bfloat16"
    arch: Annotated[str, typer.Option(help=f"Model family: {', '.join(ARCHITECTURES)}.")] = ""
    device: Annotated[str | None, typer.Option(help="E.g. cuda:0; by default this process' GPU.")] = None
    tiling: Annotated[bool, typer.Option("--tiling", help="Encode in tiles: less memory.")] = False
    slicing: Annotated[bool, typer.Option("--slicing", help="Encode image by image: less memory.")] = False
    xformers: Annotated[bool, typer.Option("--xformers", help="xformers' attention.")] = False
    compile: Annotated[bool, typer.Option("--compile", help="Let torch.compile translate the VAE.")] = False

    def check(self) -> None:
        """What can be said without loading anything.

        Raises:
            ConfigError: no VAE is named, or there is no such model family.
        """
        if not self.vae:
            raise ConfigError("no VAE to encode with: add --vae, e.g. --vae stabilityai/sdxl-vae")
        if self.arch and self.arch not in ARCHITECTURES:
            raise ConfigError(f"--arch is {self.arch!r}, but must be one of {', '.join(ARCHITECTURES)}")

    def load(self) -> Any:
        """The encoder.

        Raises:
            KohyaBucketError: none is named, or it cannot be loaded.
        """
        self.check()
        return load_vae(
            self.vae, device=self.device, dtype=self.dtype, architecture=self.arch, tiling=self.tiling,
            slicing=self.slicing, xformers=self.xformers, compile=self.compile,
        )  # fmt: skip


def load_vae(vae: str, **options: Any) -> Any:
    """An encoder from a hub name, a folder or a .safetensors file; see `load_encoder`.

    Raises:
        KohyaBucketError: what is needed to load it is not installed, or it cannot be loaded.
    """
    try:
        from kohya_bucket.latents.vae.diffusers_vae import load_encoder

        return load_encoder(vae, **options)
    except ModuleNotFoundError as missing:
        raise KohyaBucketError(
            f"a VAE needs {missing.name}, which is not installed: {pip_install('train')}"
        ) from missing


def vae_hash_of(vae: str, family: Architecture) -> str:
    """What a store knows a VAE by, which must be of this family."""
    from kohya_bucket.latents.encode.precompute import check_family
    from kohya_bucket.latents.vae.encoder import encoder_hash

    encoder = load_vae(vae, device="cpu", architecture=family.name)
    check_family(encoder, family)
    return encoder_hash(encoder)
